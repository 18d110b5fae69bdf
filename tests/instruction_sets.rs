//! The op's tests once more on every instruction set that this machine has, each in a process of its own.

use std::process::Command;

use candle_paged_attn::cpu_instruction_sets;

/// A test program built beside this one.
fn sibling(name: &str) -> std::path::PathBuf {
    let here = std::env::current_exe().unwrap();
    let mut programs: Vec<_> = std::fs::read_dir(here.parent().unwrap())
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            let hash = file.strip_prefix(&format!("{name}-")).unwrap_or_default().trim_end_matches(std::env::consts::EXE_SUFFIX);
            hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit())
        })
        .collect();
    programs.sort_by_key(|path| path.metadata().and_then(|m| m.modified()).unwrap());
    programs.pop().unwrap_or_else(|| panic!("no {name} test program; run cargo test without --test instruction_sets"))
}

#[test]
fn the_suite_passes_on_every_instruction_set() {
    let sets = cpu_instruction_sets();
    println!("this machine has {sets:?}");
    assert_eq!(sets.last().map(|isa| isa.name()), Some("portable"));
    // The best set is what the programs run on by themselves.
    for isa in &sets[1..] {
        for program in ["op", "properties"] {
            let output = Command::new(sibling(program)).env("CANDLE_PAGED_ATTN_CPU_ISA", isa.name()).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{program} on {}: {text}{}", isa.name(), String::from_utf8_lossy(&output.stderr));
            assert!(text.contains("test result: ok") && !text.contains(" 0 passed"), "{program} on {} ran nothing: {text}", isa.name());
        }
    }
}
