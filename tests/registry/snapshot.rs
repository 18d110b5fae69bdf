//! The whole decision over a grid of problems, compared with `tests/data/selections.txt`. `UPDATE_SNAPSHOT=1 cargo test --test registry`
//! rewrites the file, for a reviewer to diff.
//!
//! The file holds, for each arch, one row per (KV dtype, head_dim, page size, query_len, group). A row lists the selections of the variants of
//! [`variants`] in order, run-length encoded: `4xc 2xd@27648` is four times selection c, then twice d with 27648 bytes of LDS (LDS is written where it
//! differs from the entry before). A selection's letters stand for one line of the table at the end of the file, with every field of it but the
//! ones a row gives; fields of the key that only repeat the problem are checked against it instead.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, Flags, KernelKey, Problem, ScaleMode, Selection, select};

const KV: [(KvDtype, ScaleMode, &str); 5] = [
    (KvDtype::Bf16, ScaleMode::None, "bf16"),
    (KvDtype::F16, ScaleMode::None, "f16"),
    (KvDtype::Fp8, ScaleMode::Scalar, "fp8"),
    (KvDtype::Fp8, ScaleMode::PerToken, "fp8-token"),
    (KvDtype::Mxfp4, ScaleMode::Block, "mxfp4"),
];
const HEAD_DIMS: [usize; 6] = [64, 128, 192, 256, 512, 1024];
const PAGES: [usize; 4] = [8, 16, 64, 128];
/// (query_len, q_heads) with 2 KV heads.
const ROWS: [(usize, usize); 5] = [(1, 16), (2, 16), (4, 32), (8, 32), (1, 64)];

/// What else a problem may be, around the plain multi-partition call that comes first.
fn variants(base: &Problem) -> Vec<Problem> {
    let one = Problem { max_partitions: Some(1), ..base.clone() };
    vec![
        base.clone(),
        Problem { sinks: true, ..base.clone() },
        Problem { windowed: true, ..base.clone() },
        Problem { softcap: true, ..base.clone() },
        Problem { layout: other_layout(base.kv_dtype), ..base.clone() },
        Problem { positive_scale: false, ..base.clone() },
        Problem { kernarg_preload: 0, ..base.clone() },
        Problem { plan_free: true, max_pages: 4096, ..base.clone() },
        Problem { per_head_tables: true, ragged: true, ..one.clone() },
        Problem { windowed: true, ..one.clone() },
        Problem { sinks: true, ..one.clone() },
        Problem { output_like_query: false, ..one.clone() },
        Problem { batch: 400, ..one },
    ]
}

/// A layout that a KV dtype may also have, beside the preferred one.
fn other_layout(kv: KvDtype) -> CacheLayout {
    if kv == KvDtype::Mxfp4 { CacheLayout::Nhd } else { CacheLayout::Vllm }
}

/// Rows of the grid for one arch: a label and the problems.
fn grid() -> Vec<(String, Vec<Problem>)> {
    let mut rows = vec![];
    for (kv_dtype, scales, kv) in KV {
        let layout = if kv_dtype == KvDtype::Mxfp4 { CacheLayout::Hnd } else { CacheLayout::Shuffled };
        for (head_dim, page_size) in HEAD_DIMS.into_iter().flat_map(|d| PAGES.map(|s| (d, s))) {
            for (query_len, q_heads) in ROWS {
                let label = format!("{kv} d{head_dim} p{page_size} q{query_len} g{}", q_heads / 2);
                let shape =
                    Problem { kv_dtype, scales, layout, head_dim, page_size, query_len, q_heads, kv_heads: 2, ..Problem::default() };
                rows.push((label, variants(&Problem { batch: 16, capacity: 256, ..shape })));
            }
        }
    }
    rows
}

/// Every field of a selection that its row does not give, after checking those the key copies from the problem.
fn describe(problem: &Problem, chosen: &Selection, arch: &Arch) -> String {
    let Selection { key, cpu_isa, threads, lds_bytes: _, staged_bytes: _, row_groups, waves_per_eu, merges_tasks, reason } = chosen;
    let (kernel, reason) = (chosen.kernel(), reason.to_string());
    let copied = KernelKey {
        arch: arch.name,
        head_dim: problem.head_dim,
        page_size: problem.page_size,
        group: problem.q_heads / problem.kv_heads,
        single_query: problem.query_len == 1,
        m_tiles: key.m_tiles,
        tile_tokens: 256,
        query_dtype: problem.query_dtype,
        kv_dtype: problem.kv_dtype,
        layout: problem.layout,
        scales: problem.scales,
        per_head_tables: problem.per_head_tables,
        ragged: problem.ragged,
        windowed: problem.windowed,
        softcap: problem.softcap,
        positive_scale: problem.positive_scale,
        flags: key.flags,
        cuda: None,
    };
    assert_eq!(key, &copied);
    assert_eq!((cpu_isa, merges_tasks), (&None, &false));
    assert!(!reason.is_empty() && !reason.contains('\n'));
    let marks = schedule_marks(problem, &kernel, key.m_tiles);
    let Flags { kernarg_preload, .. } = key.flags;
    let flags = key.flags.names().join(" ");
    let (m, eu) = (key.m_tiles, waves_per_eu);
    format!("{marks} | m_tiles {m} x {row_groups} threads {threads} eu {eu} preload {kernarg_preload} | {flags} | {reason}")
}

/// What a kernel's name says of its schedule: the name without what only repeats the problem, which must be there.
fn schedule_marks(problem: &Problem, kernel: &str, m_tiles: usize) -> String {
    let prefix = format!("pa_{}_d{}_p{}_m{m_tiles}", problem.kv_dtype.name(), problem.head_dim, problem.page_size);
    let mut marks = kernel.strip_prefix(&prefix).unwrap_or_else(|| panic!("{kernel} does not start with {prefix}")).to_string();
    for (mark, present) in [
        ("_token", problem.scales == ScaleMode::PerToken),
        ("_vllm", problem.layout == CacheLayout::Vllm),
        ("_nhd", problem.layout == CacheLayout::Nhd),
        ("_window", problem.windowed),
        ("_softcap", problem.softcap),
    ] {
        assert_eq!(marks.contains(mark), present, "{mark} in {kernel}");
        marks = marks.replace(mark, "");
    }
    marks
}

/// Short names of the distinct selections, in order of appearance.
#[derive(Default)]
struct Table {
    lines: Vec<String>,
    index: HashMap<String, usize>,
}

impl Table {
    fn letters(&mut self, line: String) -> String {
        let next = self.lines.len();
        let index = *self.index.entry(line.clone()).or_insert(next);
        if index == next {
            self.lines.push(line);
        }
        letters(index)
    }
}

fn letters(mut index: usize) -> String {
    let mut text = vec![];
    loop {
        text.push(b'a' + (index % 26) as u8);
        if index < 26 {
            break;
        }
        index = index / 26 - 1;
    }
    text.iter().rev().map(|&b| b as char).collect()
}

/// One row: runs of equal entries.
fn row(problems: &[Problem], arch: &Arch, table: &mut Table) -> String {
    let mut runs: Vec<(usize, String)> = vec![];
    let mut lds = 0;
    for problem in problems {
        let entry = match select(problem, arch) {
            Ok(chosen) => {
                assert!(chosen.lds_bytes <= arch.lds_bytes, "{} bytes of LDS for {problem:?} on {arch}", chosen.lds_bytes);
                let name = table.letters(describe(problem, &chosen, arch));
                let entry = if chosen.lds_bytes == lds { name } else { format!("{name}@{}", chosen.lds_bytes) };
                lds = chosen.lds_bytes;
                entry
            }
            // The message alone: candle adds a backtrace where RUST_BACKTRACE asks for one.
            Err(error) => table.letters(format!("error: {}", error.to_string().lines().next().unwrap_or_default())),
        };
        match runs.last_mut() {
            // `a@512 a a` is `a@512` once and `2xa`: an entry with LDS starts its own run.
            Some((count, last)) if *last == entry => *count += 1,
            _ => runs.push((1, entry)),
        }
    }
    let runs: Vec<String> = runs.into_iter().map(|(n, e)| if n == 1 { e } else { format!("{n}x{e}") }).collect();
    runs.join(" ")
}

fn render() -> (String, usize) {
    let grid = grid();
    let configurations = grid.iter().map(|(_, problems)| problems.len()).sum();
    let mut table = Table::default();
    let mut text = String::new();
    for arch in [Arch::gfx942(304), Arch::gfx950()] {
        writeln!(text, "[{arch}] {configurations} configurations").unwrap();
        for (label, problems) in &grid {
            writeln!(text, "{label}: {}", row(problems, &arch, &mut table)).unwrap();
        }
    }
    text.push_str("[selections]\n");
    for (index, line) in table.lines.iter().enumerate() {
        writeln!(text, "{} = {line}", letters(index)).unwrap();
    }
    (text, configurations)
}

#[test]
fn selections_are_the_ones_recorded() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/selections.txt");
    let (text, configurations) = render();
    assert!(configurations >= 5184, "{configurations} configurations an arch");
    if std::env::var_os("UPDATE_SNAPSHOT").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert!(text.len() <= 150 << 10, "the snapshot has grown to {} bytes", text.len());
    let recorded = std::fs::read_to_string(&path).unwrap_or_default();
    if recorded != text {
        let differs = recorded.lines().zip(text.lines()).enumerate().find(|(_, (a, b))| a != b);
        match differs {
            Some((at, (was, is))) => panic!("selections.txt:{}\n was {was}\n  is {is}\nUPDATE_SNAPSHOT=1 rewrites it", at + 1),
            None => panic!("selections.txt has {} lines, now {}", recorded.lines().count(), text.lines().count()),
        }
    }
}

#[test]
fn letters_are_distinct() {
    let names: std::collections::HashSet<String> = (0..2000).map(letters).collect();
    assert_eq!(names.len(), 2000);
}

#[test]
fn equal_keys_have_equal_names_and_launches() {
    let mut seen: HashMap<KernelKey, (String, usize)> = HashMap::new();
    for arch in [Arch::gfx942(304), Arch::gfx950()] {
        for problem in grid().into_iter().flat_map(|(_, problems)| problems) {
            if let Ok(chosen) = select(&problem, &arch) {
                let launch = (chosen.kernel(), chosen.threads);
                assert_eq!(seen.entry(chosen.key).or_insert_with(|| launch.clone()), &launch);
            }
        }
    }
}
