//! Runs a kernel of a code object on the simulator and prints what it executed.

use std::path::PathBuf;

use cdna_sim::{Launch, Memory, Module};
use clap::Parser;

/// Runs a kernel of an AMD code object on the simulator and prints what it executed.
#[derive(Parser)]
struct Options {
    /// The code object (ELF).
    object: PathBuf,
    /// Kernel; may be left out where there is one.
    #[arg(long)]
    kernel: Option<String>,
    /// Workgroups, as x or x,y or x,y,z.
    #[arg(long, default_value = "1", value_parser = dimensions)]
    grid: [u32; 3],
    /// Work items a workgroup.
    #[arg(long, default_value = "64", value_parser = dimensions)]
    block: [u32; 3],
    /// Arguments in order: u32:N, i32:N, u64:N, f32:X, zeros:BYTES (a buffer), file:PATH (a buffer with a file's contents), or
    /// @OFFSET:ARG to place one at a byte offset.
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    args: Vec<String>,
    /// LDS bytes in addition to the kernel's own.
    #[arg(long, default_value_t = 0)]
    dynamic_lds: usize,
    /// Enter through the compatibility prologue instead of preloading kernel arguments.
    #[arg(long)]
    no_preload: bool,
    /// Let waves wait at different barriers.
    #[arg(long)]
    any_barrier: bool,
    /// Count uses of registers before the wait for their load instead of stopping.
    #[arg(long)]
    count_unproven: bool,
    /// Print kernels and unsupported instructions and run nothing.
    #[arg(long)]
    list: bool,
}

fn dimensions(text: &str) -> Result<[u32; 3], String> {
    let mut sizes = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 3 {
        return Err(format!("more than three dimensions in {text}"));
    }
    for (size, part) in sizes.iter_mut().zip(parts) {
        *size = part.trim().parse().map_err(|e| format!("{part}: {e}"))?;
    }
    Ok(sizes)
}

/// An argument's bytes.
fn argument(text: &str, memory: &Memory) -> Result<Vec<u8>, String> {
    let (kind, value) = text.split_once(':').ok_or_else(|| format!("argument {text} has no kind"))?;
    let number = |e: &dyn std::fmt::Display| format!("argument {text}: {e}");
    let buffer = |data: &[u8]| memory.upload(data).map(|a| a.to_le_bytes().to_vec()).ok_or_else(|| format!("argument {text}: no memory"));
    match kind {
        "u32" => Ok(value.parse::<u32>().map_err(|e| number(&e))?.to_le_bytes().to_vec()),
        "i32" => Ok(value.parse::<i32>().map_err(|e| number(&e))?.to_le_bytes().to_vec()),
        "u64" => Ok(value.parse::<u64>().map_err(|e| number(&e))?.to_le_bytes().to_vec()),
        "f32" => Ok(value.parse::<f32>().map_err(|e| number(&e))?.to_le_bytes().to_vec()),
        "zeros" => buffer(&vec![0; value.parse::<usize>().map_err(|e| number(&e))?]),
        "file" => buffer(&std::fs::read(value).map_err(|e| number(&e))?),
        _ => Err(format!("argument {text}: unknown kind {kind}")),
    }
}

/// All arguments in one segment; each is aligned to its size.
fn segment(texts: &[String], memory: &Memory) -> Result<Vec<u8>, String> {
    let mut segment = Vec::new();
    for text in texts {
        let (at, text) = match text.strip_prefix('@').and_then(|rest| rest.split_once(':')) {
            Some((at, rest)) => (Some(at.parse::<usize>().map_err(|e| format!("offset {at}: {e}"))?), rest),
            None => (None, text.as_str()),
        };
        let data = argument(text, memory)?;
        let at = at.unwrap_or_else(|| segment.len().next_multiple_of(data.len()));
        if at > 1 << 16 {
            return Err(format!("offset {at} is beyond any argument segment"));
        }
        segment.resize(segment.len().max(at + data.len()), 0);
        segment[at..at + data.len()].copy_from_slice(&data);
    }
    Ok(segment)
}

fn run(options: &Options) -> Result<(), String> {
    let object = std::fs::read(&options.object).map_err(|e| format!("{}: {e}", options.object.display()))?;
    let module = Module::load(&object).map_err(|e| e.to_string())?;
    if options.list {
        for kernel in &module.object.kernels {
            let (vgprs, split) = kernel.register_file();
            println!("{}: {vgprs} vector registers ({split} before AGPRs), {} bytes of LDS", kernel.name, kernel.group_segment_size);
        }
        for (inst, reason) in module.program.unsupported() {
            println!("{:#x}: {}: {reason}", inst.address, inst.text);
        }
        return Ok(());
    }
    let kernel = match &options.kernel {
        Some(name) => module.kernel(name).map_err(|e| e.to_string())?,
        None if module.object.kernels.len() == 1 => &module.object.kernels[0],
        None => return Err("--kernel is needed: the object has several".into()),
    };
    let memory = Memory::new();
    let arguments = segment(&options.args, &memory)?;
    let launch = Launch {
        dynamic_lds: options.dynamic_lds,
        preload: !options.no_preload,
        same_barrier: !options.any_barrier,
        proven_loads: !options.count_unproven,
        ..Launch::new(options.grid, options.block)
    };
    let start = std::time::Instant::now();
    let counters = module.launch(&memory, kernel, &arguments, &launch).map_err(|e| e.to_string())?;
    let seconds = start.elapsed().as_secs_f64();
    print!("{counters}");
    println!(
        "simulated in               {seconds:>14.3} s ({:.2} M wave instructions a second)",
        counters.instructions() as f64 / seconds / 1e6
    );
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run(&Options::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            std::process::ExitCode::FAILURE
        }
    }
}
