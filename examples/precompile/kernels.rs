//! What is to be compiled.

use anyhow::{Result, bail};
use candle_paged_attn::jit::Specialization;
use candle_paged_attn::registry::Arch;

use crate::options::KvArg;
use crate::shape::Shape;

/// Each kernel once, in the order of the shapes.
#[derive(Default)]
pub struct Kernels {
    pub specializations: Vec<Specialization>,
    /// What there is no kernel for, though the arch has others.
    pub notes: Vec<String>,
}

impl Kernels {
    /// Adds every kernel that calls of `shape` may use.
    ///
    /// Errors: no size of a shape, or not one of `archs` has kernels for it.
    pub fn add(&mut self, shape: &Shape, archs: &[Arch]) -> Result<()> {
        shape.check()?;
        for &kv in &shape.kv {
            let mut refused = vec![];
            for arch in archs {
                if let Err(error) = self.add_kv(shape, kv, arch) {
                    refused.push(format!("not compiled: {kv:?} on {}: {error:#}", arch.name));
                }
            }
            if refused.len() == archs.len() {
                bail!("{}", refused.join("\n"))
            }
            refused.into_iter().for_each(|note| self.note(note));
        }
        archs.iter().try_for_each(|arch| self.add_helpers(shape, arch))
    }

    /// Names of the kernels of `shape` on one arch.
    #[cfg(test)]
    pub fn names(shape: &Shape, arch: &Arch) -> Vec<String> {
        let mut kernels = Self::default();
        kernels.add(shape, std::slice::from_ref(arch)).unwrap();
        kernels.specializations.into_iter().map(|spec| spec.kernel).collect()
    }

    /// What depends on the KV dtype.
    fn add_kv(&mut self, shape: &Shape, kv: KvArg, arch: &Arch) -> Result<()> {
        #[cfg(feature = "rocm")]
        if arch.name.is_amd() {
            return self.add_amd(shape, kv, arch);
        }
        #[cfg(feature = "nvrtc")]
        if arch.name.is_cuda() {
            return self.add_nvidia(shape, kv, arch);
        }
        bail!("{kv:?} {shape:?}: this build has no compiler for {}", arch.name)
    }

    /// What does not.
    fn add_helpers(&mut self, shape: &Shape, arch: &Arch) -> Result<()> {
        #[cfg(feature = "rocm")]
        if arch.name.is_amd() {
            return self.add_amd_helpers(shape, arch);
        }
        let _ = (shape, arch);
        Ok(())
    }

    pub fn push(&mut self, specialization: Specialization) {
        if !self.specializations.contains(&specialization) {
            self.specializations.push(specialization);
        }
    }

    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}
