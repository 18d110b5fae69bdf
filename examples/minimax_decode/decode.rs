//! The main job: a batch of prompts decoded token by token, then again with multi-token verify, which must give the same tokens.

use anyhow::Result;
use candle::DType;
use serde_json::json;

use super::args::Args;
use super::kv::KvKind;
use super::model::Model;
use super::progress::Progress;
use super::prompts;
use super::report::Pass;
use super::scheduler::{Completion, Request, serve};
use super::serve_options;

/// Decodes and reports; `false` where the two runs' tokens differ.
pub fn run(args: &Args, model: &Model) -> Result<bool> {
    let requests = requests(args, model);
    let (plain, plain_pass) = pass(args, model, &requests, 1)?;
    let mtp_rows = args.mtp_rows();
    let verified = (mtp_rows > 1).then(|| pass(args, model, &requests, mtp_rows)).transpose()?;
    let difference = verified.as_ref().and_then(|(verified, _)| first_difference(&plain, verified));
    let passes: Vec<Pass> = std::iter::once(plain_pass).chain(verified.map(|(_, pass)| pass)).collect();
    let must_be_equal = args.dtype() == DType::F32 && args.kv() == KvKind::F32;
    print(args, &model.devices.name()?, &passes, difference.as_deref(), must_be_equal);
    Ok(difference.is_none() || !must_be_equal)
}

fn requests(args: &Args, model: &Model) -> Vec<Request> {
    let prompts = prompts::random(args.request_count(), args.context, model.config.vocab_size, args.seed);
    let stop_tokens = &model.config.eos_tokens;
    let request = |prompt| Request { prompt, max_new_tokens: args.steps, stop_tokens: stop_tokens.clone() };
    prompts.into_iter().map(request).collect()
}

fn pass(args: &Args, model: &Model, requests: &[Request], mtp_rows: usize) -> Result<(Vec<Completion>, Pass)> {
    let tokens = requests.iter().map(|request| request.prompt.len() + request.max_new_tokens).sum();
    let progress = Progress::new(if mtp_rows == 1 { "token by token" } else { "multi-token verify" }, tokens);
    let (completions, stats) = serve(model, requests, serve_options(args, model, mtp_rows), |n| progress.add(n))?;
    progress.finish();
    Ok((completions, Pass { mtp_rows, stats }))
}

/// Where two runs of the same requests part.
fn first_difference(plain: &[Completion], verified: &[Completion]) -> Option<String> {
    let part = |(a, b): (&Completion, &Completion)| {
        let at = a.tokens.iter().zip(&b.tokens).position(|(a, b)| a != b);
        at.or((a.tokens.len() != b.tokens.len()).then_some(a.tokens.len().min(b.tokens.len())))
    };
    let (sequence, at) = plain.iter().zip(verified).map(part).enumerate().find_map(|(sequence, at)| Some((sequence, at?)))?;
    let [a, b] = [&plain[sequence], &verified[sequence]].map(|completion| match completion.tokens.get(at) {
        Some(token) => token.to_string(),
        None => "the end".to_string(),
    });
    Some(format!("sequence {sequence} parts at new token {at}: {a} token by token, {b} with multi-token verify"))
}

fn print(args: &Args, device: &str, passes: &[Pass], difference: Option<&str>, must_be_equal: bool) {
    if args.json {
        let runs: Vec<_> = passes.iter().map(Pass::json).collect();
        let equal = (passes.len() > 1).then_some(difference.is_none());
        println!(
            "{}",
            json!({ "device": device, "kv": args.kv().name(), "batch": args.batch, "context": args.context, "equal": equal, "runs": runs })
        );
        return;
    }
    println!("on {device}, KV in {}", args.kv().name());
    passes.iter().for_each(|pass| println!("{}", pass.details()));
    passes.iter().for_each(|pass| println!("{}", pass.kernels()));
    passes.iter().filter_map(Pass::comparison).for_each(|comparison| println!("{comparison}"));
    match difference {
        Some(difference) if must_be_equal => println!("the runs differ: {difference}"),
        Some(difference) => println!("the runs differ, as rounding lets them: {difference}"),
        None if passes.len() > 1 => println!("both runs gave the same tokens"),
        None => {}
    }
    println!("{}", passes.iter().map(Pass::summary).collect::<Vec<_>>().join("; "));
    println!("{}", Pass::legend(passes));
}
