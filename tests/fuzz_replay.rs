//! Damaged case files, some thousand of them: nothing panics, every failure is an error that says something.
//!
//! What `fuzz/` does with libFuzzer on nightly, this does on stable with files that are nearly right, which get further into the library
//! than random bytes would.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use candle::DType;
use candle_paged_attn::Case;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};
use testkit::cases::{CaseSpec, Scales};

const SEED: u64 = 20_261;
const FILES: u64 = 60_000;
/// The run ends here even where a slow machine has not got through all files.
const TIME: Duration = Duration::from_secs(10);

#[test]
fn no_file_panics() {
    let originals = originals();
    let start = Instant::now();
    let (mut ran, mut refused) = (0, 0);
    for number in (0..FILES).take_while(|_| start.elapsed() < TIME) {
        let mut rng = StdRng::seed_from_u64(SEED + number);
        let bytes = damaged(&originals[number as usize % originals.len()], &mut rng);
        match quietly(|| Case::from_bytes(&bytes).and_then(|case| case.run())) {
            Ok(Ok(_)) => ran += 1,
            Ok(Err(error)) if error.to_string().trim().is_empty() => fail(number, &bytes, &"an error without a message"),
            Ok(Err(_)) => refused += 1,
            Err(panic) => fail(number, &bytes, &*panic),
        }
    }
    // The damage is neither always harmless nor always stopped at the door.
    assert!(ran * 20 > refused && refused * 20 > ran, "{ran} ran, {refused} were refused");
    println!("{ran} ran, {refused} were refused, in {:?}", start.elapsed());
}

/// What `f` gives, or the panic it ended in, which nothing is printed of here.
fn quietly<T>(f: impl FnOnce() -> T) -> std::thread::Result<T> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = catch_unwind(AssertUnwindSafe(f));
    std::panic::set_hook(hook);
    result
}

/// Keeps the file and names it.
fn fail(number: u64, bytes: &[u8], panic: &(dyn std::any::Any + Send)) -> ! {
    let path = std::env::temp_dir().join(format!("candle-paged-attn-fuzz-{number}.safetensors"));
    let written = std::fs::write(&path, bytes);
    let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    panic!("file {number} ({}, {written:?}): {}", path.display(), message.unwrap_or("a panic without a message"))
}

/// A file before it is bytes, so that any part can be wrong.
#[derive(Clone)]
struct File {
    tensors: Vec<Entry>,
    metadata: Map<String, Value>,
}

#[derive(Clone)]
struct Entry {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    data: Vec<u8>,
}

impl File {
    fn of(spec: &CaseSpec) -> Self {
        let call = spec.build().unwrap();
        let case =
            Case::capture(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options).unwrap();
        let bytes = case.to_bytes().unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap().into_iter().map(|(key, value)| (key, Value::String(value)));
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| Entry {
            name,
            dtype: view.dtype().to_string(),
            shape: view.shape().iter().map(|&dim| dim as u64).collect(),
            data: view.data().to_vec(),
        });
        let mut tensors: Vec<_> = tensors.collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Self { tensors, metadata: metadata.collect() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), Value::Object(self.metadata.clone()));
        let mut data = vec![];
        for entry in &self.tensors {
            let start = data.len();
            data.extend(&entry.data);
            header.insert(entry.name.clone(), json!({ "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, data.len()] }));
        }
        let header = Value::Object(header).to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }
}

/// Calls that between them take every branch of the reader.
fn originals() -> Vec<File> {
    let base = CaseSpec { lens: vec![37, 0, 5], head_dim: 32, page_size: 16, ..CaseSpec::default() };
    let specs = [
        CaseSpec { sinks: true, softcap: Some(5.0), softmax_scale: Some(0.2), ..base.clone() },
        CaseSpec {
            kv_dtype: KvDtype::Bf16,
            q_dtype: DType::BF16,
            window: Some(9),
            query_lens: vec![3],
            signed_tables: true,
            ..base.clone()
        },
        CaseSpec {
            kv_dtype: KvDtype::Fp8,
            scales: Scales::PerToken,
            layout: CacheLayout::Shuffled,
            query_lens: vec![2, 0, 4],
            ..base.clone()
        },
        CaseSpec {
            kv_dtype: KvDtype::Fp8,
            scales: Scales::ScalarTensor,
            layout: CacheLayout::Vllm,
            max_partitions: Some(2),
            ..base.clone()
        },
        CaseSpec { kv_dtype: KvDtype::Mxfp4, layout: CacheLayout::Hnd, plan_free: true, ..base.clone() },
        CaseSpec { kv_dtype: KvDtype::F16, q_dtype: DType::F16, per_head: true, workgroup_budget: Some(8), query_lens: vec![2], ..base },
    ];
    let mut files: Vec<_> = specs.iter().map(File::of).collect();
    for file in &files {
        Case::from_bytes(&file.bytes()).unwrap().run().unwrap();
    }
    files.push(with_plan(&files[0]));
    files
}

/// The file with a plan of its own: one task for each sequence that has tokens.
fn with_plan(file: &File) -> File {
    let mut file = file.clone();
    let ints = |name: &str, shape: &[u64], values: &[i32]| Entry {
        name: name.into(),
        dtype: "I32".into(),
        shape: shape.to_vec(),
        data: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    file.tensors.push(ints("work_info", &[2, 4], &[0, 0, 1, 0, 2, 0, 1, 0]));
    file.tensors.push(ints("reduce_info", &[3, 2], &[0, 1, 1, 0, 1, 1]));
    file.metadata.insert("plan".into(), "given".into());
    Case::from_bytes(&file.bytes()).unwrap().run().unwrap();
    file
}

/// The file with one to three things wrong.
fn damaged(file: &File, rng: &mut StdRng) -> Vec<u8> {
    let mut file = file.clone();
    let times = rng.random_range(1..=3);
    for _ in 0..times {
        match rng.random_range(0..12) {
            0 => set_metadata(&mut file, rng),
            1 => extreme_dim(&mut file, rng),
            2 => reshape(&mut file, rng),
            3 => resize(&mut file, rng),
            4 => retype(&mut file, rng),
            5 => {
                file.tensors.remove(rng.random_range(0..file.tensors.len()));
            }
            6 => rename(&mut file, rng),
            7 => swap_data(&mut file, rng),
            _ => extreme_elements(&mut file, rng),
        }
        if file.tensors.is_empty() {
            break;
        }
    }
    let mut bytes = file.bytes();
    match rng.random_range(0..10) {
        0 => bytes.truncate(rng.random_range(0..bytes.len())),
        1 => bytes.extend((0..rng.random_range(1..64)).map(|_| rng.random::<u8>())),
        2 => (0..rng.random_range(1..8)).for_each(|_| flip(&mut bytes, rng)),
        _ => {}
    }
    bytes
}

fn any<'a, T>(of: &'a mut [T], rng: &mut StdRng) -> &'a mut T {
    let at = rng.random_range(0..of.len());
    &mut of[at]
}

fn flip(bytes: &mut [u8], rng: &mut StdRng) {
    // Half of them in the header, which is a small part of the file.
    let end = if rng.random() { bytes.len().min(600) } else { bytes.len() };
    let at = rng.random_range(0..end);
    bytes[at] ^= 1 << rng.random_range(0..8);
}

fn set_metadata(file: &mut File, rng: &mut StdRng) {
    const KEYS: [&str; 9] =
        ["query_len", "layout", "softmax_scale", "window", "softcap", "max_partitions", "workgroup_budget", "plan", "colour"];
    const VALUES: [&str; 22] = [
        "",
        "0",
        "1",
        "2",
        "3",
        "-1",
        "7",
        "100",
        "NaN",
        "inf",
        "-inf",
        "1e39",
        "1e-45",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
        "free",
        "given",
        "nhd",
        "hnd",
        "vllm",
        "shuffled",
    ];
    let key = KEYS[rng.random_range(0..KEYS.len())];
    let value = VALUES[rng.random_range(0..VALUES.len())];
    match rng.random_range(0..8) {
        0 => drop(file.metadata.remove(key)),
        1 => drop(file.metadata.insert(key.into(), json!([value]))),
        _ => drop(file.metadata.insert(key.into(), value.into())),
    }
}

const DIMS: [u64; 12] = [0, 1, 2, 3, 8, 32, 1 << 16, 1 << 31, 1 << 32, 1 << 33, 1 << 62, u64::MAX];

/// A dim that the data does not have, with the data dropped half of the time, as a dim of 0 beside it allows.
fn extreme_dim(file: &mut File, rng: &mut StdRng) {
    let entry = any(&mut file.tensors, rng);
    if entry.shape.is_empty() {
        return;
    }
    *any(&mut entry.shape, rng) = DIMS[rng.random_range(0..DIMS.len())];
    if rng.random() {
        *any(&mut entry.shape, rng) = 0;
        entry.data.clear();
    }
}

/// Another shape of the same number of elements.
fn reshape(file: &mut File, rng: &mut StdRng) {
    let entry = any(&mut file.tensors, rng);
    match rng.random_range(0..5) {
        0 => entry.shape.reverse(),
        1 => entry.shape.insert(rng.random_range(0..=entry.shape.len()), 1),
        2 if !entry.shape.is_empty() => {
            let dim = entry.shape.remove(0);
            if let Some(next) = entry.shape.first_mut() {
                *next = next.wrapping_mul(dim);
            }
        }
        3 => entry.shape = vec![entry.shape.iter().fold(1, |n: u64, &dim| n.wrapping_mul(dim))],
        _ if entry.shape.len() >= 2 => {
            let (from, to) = (rng.random_range(0..entry.shape.len()), rng.random_range(0..entry.shape.len()));
            let factor = [2, 4, 16][rng.random_range(0..3)];
            if entry.shape[from].is_multiple_of(factor) {
                entry.shape[from] /= factor;
                entry.shape[to] = entry.shape[to].wrapping_mul(factor);
            }
        }
        _ => {}
    }
}

/// Fewer or more entries along the first dim, data included.
fn resize(file: &mut File, rng: &mut StdRng) {
    let entry = any(&mut file.tensors, rng);
    let Some(&first) = entry.shape.first() else { return };
    if first == 0 || first > 1 << 20 {
        return;
    }
    let one = entry.data.len() / first as usize;
    entry.shape[0] = rng.random_range(0..=first + 2);
    entry.data.resize(one * entry.shape[0] as usize, rng.random());
}

/// Another dtype, with the last dim adjusted half of the time.
fn retype(file: &mut File, rng: &mut StdRng) {
    const DTYPES: [(&str, u64); 10] =
        [("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("U8", 1), ("U32", 4), ("I32", 4), ("I64", 8), ("F4", 0), ("BOOL", 1)];
    let entry = any(&mut file.tensors, rng);
    let (name, size) = DTYPES[rng.random_range(0..DTYPES.len())];
    entry.dtype = name.into();
    let elements: u64 = entry.shape.iter().rev().skip(1).fold(1, |n, &dim| n.wrapping_mul(dim));
    if let Some(last) = entry.shape.last_mut()
        && rng.random()
        && size > 0
        && elements > 0
    {
        *last = entry.data.len() as u64 / size / elements;
    }
}

fn rename(file: &mut File, rng: &mut StdRng) {
    const NAMES: [&str; 8] = ["q", "k_scale", "v_scale", "sinks", "query_start", "expected", "key_block_scale", "colour"];
    any(&mut file.tensors, rng).name = NAMES[rng.random_range(0..NAMES.len())].into();
}

/// One tensor with another's dtype, shape and data.
fn swap_data(file: &mut File, rng: &mut StdRng) {
    let other = any(&mut file.tensors, rng).clone();
    let entry = any(&mut file.tensors, rng);
    *entry = Entry { name: entry.name.clone(), ..other };
}

/// Values that no sound call has: page ids, lengths, starts, plan records, scales.
fn extreme_elements(file: &mut File, rng: &mut StdRng) {
    const WORDS: [u32; 14] =
        [0, 1, 2, 15, 16, 17, 0xffff_ffff, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, 0x7fc0_0000, 0x7f80_0000, 0xff80_0000, 0x0001_0000];
    let small = ["block_tables", "context_lens", "query_start", "work_info", "reduce_info", "k_scale", "v_scale", "sinks"];
    let mut entries: Vec<_> = file.tensors.iter_mut().filter(|e| small.contains(&e.name.as_str()) && e.data.len() >= 4).collect();
    if entries.is_empty() {
        return;
    }
    let entry = any(&mut entries, rng);
    for _ in 0..rng.random_range(1..4) {
        let word = if rng.random_range(0..4) == 0 { rng.random() } else { WORDS[rng.random_range(0..WORDS.len())] };
        let (words, _) = entry.data.as_chunks_mut::<4>();
        *any(words, rng) = word.to_le_bytes();
    }
}
