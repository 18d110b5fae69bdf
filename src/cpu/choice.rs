//! Which instruction set calls run on.

use candle::{Result, bail};
use once_cell::sync::Lazy;

use super::{available, detect};
use crate::registry::CpuIsa;

/// The variable that overrides the choice, for bug hunts and comparisons.
const VARIABLE: &str = "CANDLE_PAGED_ATTN_CPU_ISA";

static CHOICE: Lazy<std::result::Result<CpuIsa, String>> = Lazy::new(|| match std::env::var(VARIABLE) {
    Ok(name) if !name.is_empty() => named(&name),
    _ => Ok(detect()),
});

/// The machine's best instruction set, or the one that `CANDLE_PAGED_ATTN_CPU_ISA` names (read once).
pub(crate) fn isa() -> Result<CpuIsa> {
    match &*CHOICE {
        Ok(isa) => Ok(*isa),
        Err(message) => bail!("{message}"),
    }
}

fn named(name: &str) -> std::result::Result<CpuIsa, String> {
    let names = CpuIsa::ALL.map(CpuIsa::name).join(", ");
    match CpuIsa::ALL.into_iter().find(|isa| isa.name() == name) {
        Some(isa) if available(isa) => Ok(isa),
        Some(_) => Err(format!("{VARIABLE}: this machine does not have {name}")),
        None => Err(format!("{VARIABLE}: {name:?} is not one of {names}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_is_named_or_refused() {
        assert_eq!(named("portable"), Ok(CpuIsa::Portable));
        assert!(named("sse2").unwrap_err().contains("avx2"));
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        assert!(named(foreign).unwrap_err().contains("does not have"));
    }
}
