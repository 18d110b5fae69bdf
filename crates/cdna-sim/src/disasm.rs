//! Runs `llvm-objdump` on a code object and splits its lines.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::elf::Arch;
use crate::error::{Error, Result};

/// One instruction as the disassembler prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Mnemonic and operands.
    pub text: String,
    /// Address in the code object.
    pub address: u64,
    /// Encoding, low word first.
    pub words: Vec<u32>,
}

/// Names under which a new enough `llvm-objdump` may be found, `CDNA_SIM_OBJDUMP` first.
fn candidates() -> Vec<String> {
    let mut names: Vec<String> = std::env::var("CDNA_SIM_OBJDUMP").ok().into_iter().collect();
    names.extend(std::env::var("ROCM_PATH").ok().map(|root| format!("{root}/llvm/bin/llvm-objdump")));
    names.extend((20..=24).rev().map(|version| format!("llvm-objdump-{version}")));
    names.push("llvm-objdump".to_string());
    names
}

/// The instructions of the code object in `bytes`, by address.
pub fn disassemble(bytes: &[u8], arch: Arch) -> Result<Vec<Line>> {
    let mut last = "none was found".to_string();
    for name in candidates() {
        match run(&name, bytes, arch) {
            Ok(text) => return parse(&text),
            Err(reason) => last = reason,
        }
    }
    Err(Error::Disassembler(last))
}

fn run(program: &str, bytes: &[u8], arch: Arch) -> std::result::Result<String, String> {
    let mut child = Command::new(program)
        .args(["-d", "-z", &format!("--mcpu={}", arch.name()), "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{program}: {e}"))?;
    let mut stdin = child.stdin.take().ok_or("no standard input")?;
    let input = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().map_err(|e| format!("{program}: {e}"))?;
    // A disassembler that stops early closes the pipe: its exit status tells why.
    let _ = writer.join();
    if !output.status.success() {
        return Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("{program}: {e}"))
}

/// Parses the disassembler's text: an instruction line is `text // ADDRESS: WORD WORD... [<symbol>]`.
pub fn parse(text: &str) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('\t')) {
        let bad = || Error::Disassembler(format!("unexpected line `{}`", line.trim()));
        let (instruction, comment) = line.split_once("//").ok_or_else(bad)?;
        let (address, encoding) = comment.trim().split_once(':').ok_or_else(bad)?;
        let address = u64::from_str_radix(address.trim(), 16).map_err(|_| bad())?;
        let words: Vec<u32> = encoding.split_whitespace().map_while(|word| u32::from_str_radix(word, 16).ok()).collect();
        if words.is_empty() {
            return Err(bad());
        }
        lines.push(Line { text: instruction.trim().to_string(), address, words });
    }
    Ok(lines)
}
