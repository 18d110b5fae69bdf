//! The mixture of experts: a sigmoid router with a selection bias, routed experts, one shared expert.

use candle::{D, DType, Device, Result, Tensor};
use candle_nn::{Linear, Module};

use super::checkpoint::Checkpoint;
use super::config::Config;
use super::mlp::{Mlp, linear};
use super::tensors::{EXPERT_NAMES, MLP_NAMES};

pub struct Moe {
    router: Linear,
    /// Added to the scores for the choice of experts only.
    bias: Vec<f32>,
    experts: Vec<Mlp>,
    shared: Mlp,
    experts_per_token: usize,
    scaling: f64,
}

impl Moe {
    pub fn load(checkpoint: &Checkpoint, prefix: &str, config: &Config, dtype: DType, device: &Device) -> anyhow::Result<Self> {
        let expert = |expert| {
            let prefix = format!("{prefix}.experts.{expert}");
            Mlp::load(checkpoint, &prefix, EXPERT_NAMES, config, dtype, device)
        };
        Ok(Self {
            router: linear(checkpoint, &format!("{prefix}.gate.weight"), dtype, device)?,
            bias: checkpoint.load(&format!("{prefix}.e_score_correction_bias"), DType::F32, device)?.to_vec1()?,
            experts: (0..config.experts).map(expert).collect::<anyhow::Result<_>>()?,
            shared: Mlp::load(checkpoint, &format!("{prefix}.shared_experts"), MLP_NAMES, config, dtype, device)?,
            experts_per_token: config.experts_per_token,
            scaling: config.routed_scaling_factor,
        })
    }

    /// `x` `[rows, hidden]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scores = candle_nn::ops::sigmoid(&self.router.forward(x)?.to_dtype(DType::F32)?)?;
        let routes: Vec<Vec<Route>> = scores.to_vec2()?.iter().map(|scores| route(scores, &self.bias, self.experts_per_token)).collect();
        let routed = (self.run_experts(x, &routes)? * self.scaling)?;
        routed + self.shared.forward(x)?
    }

    /// Each expert runs once, over all rows routed to it; its results are then gathered back to their rows and summed.
    fn run_experts(&self, x: &Tensor, routes: &[Vec<Route>]) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let mut members = vec![vec![]; self.experts.len()];
        for (row, routes) in routes.iter().enumerate() {
            for (rank, route) in routes.iter().enumerate() {
                members[route.expert].push((row, rank));
            }
        }
        let mut outputs = vec![];
        let mut place = vec![0u32; rows * self.experts_per_token];
        let mut next = 0;
        for (expert, members) in self.experts.iter().zip(&members).filter(|(_, members)| !members.is_empty()) {
            for &(row, rank) in members {
                place[row * self.experts_per_token + rank] = next;
                next += 1;
            }
            let rows = members.iter().map(|&(row, _)| row as u32).collect::<Vec<_>>();
            let rows = Tensor::new(rows, x.device())?;
            outputs.push(expert.forward(&x.index_select(&rows, 0)?)?);
        }
        let place = Tensor::new(place, x.device())?;
        let outputs = Tensor::cat(&outputs, 0)?.index_select(&place, 0)?.reshape((rows, self.experts_per_token, hidden))?;
        let weights: Vec<f32> = routes.iter().flatten().map(|route| route.weight).collect();
        let weights = Tensor::from_vec(weights, (rows, self.experts_per_token, 1), x.device())?.to_dtype(x.dtype())?;
        outputs.broadcast_mul(&weights)?.sum(D::Minus2)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Route {
    expert: usize,
    weight: f32,
}

/// The `count` experts of largest biased score, in the order of their numbers, weighted by their unbiased scores normalized to sum 1.
fn route(scores: &[f32], bias: &[f32], count: usize) -> Vec<Route> {
    let biased = |&expert: &usize| scores[expert] + bias[expert];
    let mut experts: Vec<usize> = (0..scores.len()).collect();
    experts.sort_by(|a, b| biased(b).total_cmp(&biased(a)));
    experts.truncate(count);
    experts.sort_unstable();
    let sum: f32 = experts.iter().map(|&expert| scores[expert]).sum();
    experts.into_iter().map(|expert| Route { expert, weight: scores[expert] / sum }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_chooses_but_does_not_weigh() {
        let routes = route(&[0.5, 0.9, 0.2, 0.6], &[0.0, 0.0, 1.0, 0.0], 2);
        let experts: Vec<usize> = routes.iter().map(|route| route.expert).collect();
        assert_eq!(experts, [1, 2]);
        assert!((routes[0].weight - 0.9 / 1.1).abs() < 1e-6 && (routes[1].weight - 0.2 / 1.1).abs() < 1e-6);
    }
}
