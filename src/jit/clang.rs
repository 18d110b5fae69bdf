//! Finding a clang and running it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::search::{self, OLDEST};
use super::sources::AMD;
use super::specialization::Specialization;

/// Lines of the compiler's messages that an error shows.
const SHOWN_LINES: usize = 40;

/// A compiler that was found and is new enough.
#[derive(Clone, Debug)]
pub(super) struct Clang {
    program: PathBuf,
    /// First line that `--version` prints. It names vendor, version and, where there is one, the revision.
    pub version: String,
}

impl Clang {
    /// The first that serves: `given`, or the environment's (see the module's table). The error says what was found and where was looked.
    pub(super) fn find(given: Option<&Path>) -> Result<Self, String> {
        let mut tried = vec![];
        for program in search::clangs(given) {
            match Self::ask(&program) {
                Ok(clang) => return Ok(clang),
                Err(why) => tried.push(format!("\n  {}: {why}", program.display())),
            }
        }
        Err(format!(
            "there is no clang of version {OLDEST} or newer to compile it with (install ROCm 7's, or LLVM's with lld; or set \
            CANDLE_PAGED_ATTN_CLANG; or fill the cache beforehand with examples/precompile). Looked at:{}",
            tried.concat()
        ))
    }

    /// Asks `program` for its version.
    fn ask(program: &Path) -> Result<Self, String> {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().map_err(|error| match error.kind() {
            ErrorKind::NotFound => "not found".to_string(),
            _ => error.to_string(),
        })?;
        if !output.status.success() {
            return Err(format!("--version: {}", output.status));
        }
        let version = version(&String::from_utf8_lossy(&output.stdout))?;
        // A relative path is meant from here; a name alone is found in PATH.
        let relative = program.components().count() > 1;
        let program = if relative { std::path::absolute(program).map_err(|error| error.to_string())? } else { program.into() };
        Ok(Self { program, version })
    }

    /// Compiles; nothing is left behind. The error has what the compiler said.
    pub(super) fn compile(&self, spec: &Specialization, root: &str) -> Result<Vec<u8>, String> {
        let folder = tempfile::Builder::new().prefix("candle-paged-attn-").tempdir();
        let folder = folder.map_err(|error| format!("jit: no temporary folder for the compiler: {error}"))?;
        write_sources(folder.path()).map_err(|error| format!("jit: writing kernel sources to {}: {error}", folder.path().display()))?;
        let (input, code) = (Path::new("kernels").join(root), folder.path().join("kernel.co"));
        // Run beside the sources, so that messages name them as this repository does.
        let mut command = Command::new(&self.program);
        command.current_dir(&folder).args(spec.arguments()).arg(input).arg("-o").arg(&code).stdin(Stdio::null());
        let output = command.output().map_err(|error| format!("jit: running {}: {error}", self.program.display()))?;
        if !output.status.success() {
            let (program, version) = (self.program.display(), &self.version);
            return Err(format!("jit: {program} ({version}) cannot compile {} for {}: {}", spec.kernel, spec.arch, said(&output)));
        }
        fs::read(&code).map_err(|error| format!("jit: {} succeeded without a result: {error}", self.program.display()))
    }
}

/// The line of `--version`'s output that names the version (`Debian clang version 22.1.8 (1~deb12u1)`, `AMD clang version 20.0.0git (...)`; hipcc
/// prints it second), or why the compiler does not serve.
fn version(output: &str) -> Result<String, String> {
    let numbered = output.lines().find_map(|line| Some((line.trim(), line.split_once("clang version ")?.1)));
    let Some((line, number)) = numbered else {
        return Err(format!("not a clang ({})", output.lines().next().unwrap_or("it prints no version").trim()));
    };
    match number.split(|c: char| !c.is_ascii_digit()).next().and_then(|major| major.parse::<u32>().ok()) {
        // Apple counts apart from LLVM.
        _ if line.starts_with("Apple") => Err(format!("Apple's compiles for no AMD GPU ({line})")),
        Some(major) if major >= OLDEST => Ok(line.to_string()),
        Some(major) => Err(format!("version {major} is older than {OLDEST} ({line})")),
        None => Err(format!("a clang without a version number ({line})")),
    }
}

fn write_sources(folder: &Path) -> std::io::Result<()> {
    for (path, text) in AMD {
        let path = folder.join("kernels").join(path);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// How the compiler ended and what it said, within reason.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = text.trim().lines().collect();
    let shown = lines[..lines.len().min(SHOWN_LINES)].join("\n");
    let rest = match lines.len().saturating_sub(SHOWN_LINES) {
        0 => String::new(),
        more => format!("\n({more} more lines)"),
    };
    let hint = if text.contains("lld") { "\n(the linker lld belongs to clang: Debian's lld-22, say)" } else { "" };
    format!("{}\n{shown}{rest}{hint}", output.status)
}
