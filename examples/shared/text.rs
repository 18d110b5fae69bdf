//! Text on its way to the terminal.

use std::io::{ErrorKind, Write};

use anyhow::Result;

/// `1 tile`, `2 tiles`.
pub fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Prints to stdout; a reader that has left (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
