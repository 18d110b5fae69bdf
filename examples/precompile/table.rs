//! The table of what was compiled.

use candle_paged_attn::jit::Specialization;
use cdna_sim::elf::Resources;

use crate::build::{Job, Outcome};

const HEADINGS: [&str; 10] = ["kernel", "of", "arch", "registers", "AGPRs", "SGPRs", "spills", "scratch", "LDS", "seconds"];
/// Columns of text; numbers are set right.
const LEFT: usize = 3;

/// One line a kernel, failures with their messages below; that there is no compiler is said once.
pub fn draw(jobs: &[Job]) -> String {
    let mut rows = vec![HEADINGS.map(String::from)];
    let mut failures = String::new();
    let mut uncompiled: Vec<&str> = vec![];
    for job in jobs {
        match &job.outcome {
            Outcome::Hit(resources) => rows.push(row(&job.spec, resources, "cached".to_string())),
            Outcome::Compiled { resources, seconds } => rows.push(row(&job.spec, resources, format!("{seconds:.2}"))),
            Outcome::Failed(error) => failures.push_str(&format!("FAILED {} for {}: {error}\n", job.spec.kernel, job.spec.arch)),
            Outcome::NoCompiler(why) => uncompiled.push(why),
            Outcome::Open => {}
        }
    }
    if let Some(why) = uncompiled.first() {
        failures.push_str(&format!("FAILED, not in the cache: {} of {} kernels: {why}\n", uncompiled.len(), jobs.len()));
    }
    let widths: Vec<_> = (0..HEADINGS.len()).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 10]| {
        let cell = |(i, text): (usize, &String)| {
            let width = widths[i];
            if i < LEFT { format!("{text:width$}") } else { format!("{text:>width$}") }
        };
        format!("{}\n", row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  "))
    };
    rows.iter().map(line).collect::<String>() + &failures
}

/// Registers and scratch are a lane's or thread's, spills of vector + scalar registers; NVIDIA's spills are in the scratch.
fn row(spec: &Specialization, r: &Resources, seconds: String) -> [String; 10] {
    let amd = |text: String| if spec.arch.is_amd() { text } else { "-".to_string() };
    let spills = amd(format!("{}+{}", r.vgpr_spills, r.sgpr_spills));
    let (vgprs, agprs, sgprs) = (r.vgprs.to_string(), amd(r.agprs.to_string()), amd(r.sgprs.to_string()));
    let kernel = spec.kernel.clone();
    [kernel, marks(spec), spec.arch.to_string(), vgprs, agprs, sgprs, spills, r.scratch_bytes.to_string(), r.lds_bytes.to_string(), seconds]
}

/// What a tile's name leaves out.
fn marks(spec: &Specialization) -> String {
    let value = |name: &str| spec.defines.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value);
    let mut marks = vec![];
    if !value("PA_GROUP").is_empty() {
        marks.push(format!("group {}", value("PA_GROUP")));
        marks.extend((value("PA_SINGLE_QUERY") == "0").then(|| "multi-query".to_string()));
        marks.extend((value("PA_RAGGED") == "1").then(|| "ragged".to_string()));
        marks.extend((value("PA_PER_HEAD") == "1").then(|| "per-head".to_string()));
        marks.extend(match value("PA_QUERY") {
            "1" => Some("f16".to_string()),
            "2" => Some("f32".to_string()),
            _ => None,
        });
    }
    marks.join(" ")
}
