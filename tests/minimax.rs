//! The MiniMax-M3 example: against Hugging Face's recording, against itself, and against broken checkpoints.

#[allow(dead_code, reason = "the example's main is not called here")]
#[path = "../examples/minimax_decode/main.rs"]
mod minimax_decode;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use clap::Parser;
use minimax_decode::args::Args;
use minimax_decode::check::{self, Comparison};
use minimax_decode::checkpoint::Checkpoint;
use minimax_decode::config::{Config, IndexerConfig, LayerKind};
use minimax_decode::kv::KvKind;
use minimax_decode::model::Model;
use minimax_decode::sampling::Sampling;
use minimax_decode::scheduler::{Completion, Request, ServeOptions, Stats, serve};
use minimax_decode::{prompts, synthetic};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/minimax_m3_tiny")
}

fn load(dir: &Path, rope: DType) -> anyhow::Result<Model> {
    let config = Config::from_dir(dir)?;
    Model::load(&Checkpoint::open(dir, &config)?, config, DType::F32, rope, &Device::Cpu, || {})
}

fn options(max_rows: usize, mtp_rows: usize) -> ServeOptions {
    ServeOptions {
        kv: KvKind::F32,
        max_batch: 3,
        max_rows,
        mtp_rows,
        page_size: 128,
        pages: None,
        sampling: Sampling::greedy(),
        keep_logits: true,
        compare_attention: false,
    }
}

/// A random model of one dense and two sparse layers.
fn random_model(seed: u64) -> Model {
    let kind = |moe, sparse| LayerKind { moe, sparse };
    let config = Config {
        vocab_size: 128,
        hidden_size: 64,
        expert_size: 32,
        dense_size: 64,
        shared_size: 32,
        q_heads: 4,
        head_dim: 32,
        rotary_dim: 16,
        layers: vec![kind(false, false), kind(true, true), kind(true, true)],
        indexer: IndexerConfig { heads: 2, head_dim: 32, block_size: 128, top_blocks: 2, local_blocks: 1 },
        ..synthetic::config()
    };
    let dir = tempfile::tempdir().unwrap();
    synthetic::write(dir.path(), &config, seed).unwrap();
    assert_eq!(Config::from_dir(dir.path()).unwrap(), config);
    load(dir.path(), DType::F32).unwrap()
}

fn requests(count: usize, length: usize, steps: usize) -> Vec<Request> {
    let request = |prompt| Request { prompt, max_new_tokens: steps, stop_tokens: vec![] };
    prompts::random(count, length, 128, 3).into_iter().map(request).collect()
}

fn run(model: &Model, requests: &[Request], options: ServeOptions) -> (Vec<Completion>, Stats) {
    serve(model, requests, options, |_| {}).unwrap()
}

fn tokens(completions: &[Completion]) -> Vec<Vec<u32>> {
    completions.iter().map(|completion| completion.tokens.clone()).collect()
}

fn worst_difference(a: &[Completion], b: &[Completion]) -> f32 {
    let values = |completions: &[Completion]| completions.iter().flat_map(|c| c.logits.concat()).collect::<Vec<f32>>();
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(&b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |worst, difference| if worst.is_nan() || difference <= worst { worst } else { difference })
}

fn check_fixture(options: ServeOptions) -> Vec<Comparison> {
    let model = load(&fixture(), DType::BF16).unwrap();
    let recorded = check::read(&fixture().join("expected.safetensors"), model.config.vocab_size).unwrap();
    check::check(&model, &recorded, options, |_| {}).unwrap()
}

#[test]
fn logits_and_tokens_are_hugging_faces() {
    for options in [options(512, 1), options(100, 4)] {
        let comparisons = check_fixture(options);
        assert_eq!(comparisons.iter().map(|c| c.prompt_tokens).collect::<Vec<_>>(), [37, 300, 700]);
        for comparison in comparisons {
            assert!(comparison.worst <= 2e-4 && comparison.first_difference.is_none(), "{comparison:?}");
        }
    }
}

#[test]
fn half_precision_kv_stays_near() {
    for kv in [KvKind::F16, KvKind::Bf16] {
        let first = &check_fixture(ServeOptions { kv, ..options(512, 1) })[0];
        assert!(first.worst > 1e-5 && first.worst < 5e-2 && first.first_difference.is_none(), "{kv:?}: {first:?}");
    }
}

/// The fixture's first prompts with its KV cache on an AMD GPU, compared with what was recorded.
#[cfg(feature = "rocm")]
fn check_fixture_on_rocm(prompts: usize, options: ServeOptions) -> anyhow::Result<Vec<Comparison>> {
    let devices = minimax_decode::args::Devices { model: Device::Cpu, rocm: Some(candle_paged_attn::rocm::RocmDevice::new(0)?) };
    let config = Config::from_dir(&fixture())?;
    let model = Model::load(&Checkpoint::open(&fixture(), &config)?, config, DType::F32, DType::BF16, devices, || {})?;
    let mut recorded = check::read(&fixture().join("expected.safetensors"), model.config.vocab_size)?;
    recorded.truncate(prompts);
    check::check(&model, &recorded, options, |_| {})
}

#[cfg(feature = "rocm")]
#[test]
fn a_cache_on_an_amd_gpu_gives_hugging_faces_tokens() {
    for kv in [KvKind::F16, KvKind::Bf16] {
        let options = ServeOptions { kv, ..options(512, 4) };
        let on_cpu = check_fixture(options.clone());
        for (i, (gpu, cpu)) in check_fixture_on_rocm(3, options).unwrap().iter().zip(&on_cpu).enumerate() {
            println!("{kv:?}: {gpu:?}, on the CPU {cpu:?}");
            // What storing K and V in 16 bits does to logits, it does on both; once it turns the third prompt's closest choice.
            assert!(gpu.worst < 5e-2 && (gpu.worst - cpu.worst).abs() < 1e-3, "{kv:?}: {gpu:?}, on the CPU {cpu:?}");
            assert_eq!(gpu.first_difference, cpu.first_difference, "{kv:?}: {gpu:?}");
            assert!(gpu.first_difference.is_none() || kv == KvKind::Bf16 && i == 2, "{kv:?}: {gpu:?}");
        }
    }
}

#[cfg(feature = "rocm")]
#[test]
fn an_f32_cache_is_refused_on_an_amd_gpu() {
    let error = check_fixture_on_rocm(1, options(512, 1)).err().unwrap().to_string();
    assert!(error.contains("F32 cache") && error.contains("BF16"), "{error}");
}

#[test]
fn every_kv_kind_decodes() {
    let model = random_model(1);
    for kv in [KvKind::Fp8, KvKind::Fp8PerToken, KvKind::Mxfp4] {
        let (completions, _) = run(&model, &requests(2, 150, 4), ServeOptions { kv, ..options(512, 1) });
        assert!(completions.iter().all(|c| c.tokens.len() == 4 && c.logits.concat().iter().all(|logit| logit.is_finite())), "{kv:?}");
    }
}

#[test]
fn the_check_fails_on_a_wrong_token_and_a_wrong_logit() {
    let args = |file: &str| {
        let dir = fixture();
        Args::parse_from(["minimax_decode", "--model", dir.to_str().unwrap(), "--check", file, "--json"])
    };
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = candle::safetensors::load(fixture().join("expected.safetensors"), &Device::Cpu).unwrap();
    tensors.retain(|name, _| name.ends_with(".0"));
    let mut verdict = |name: &str, value: Tensor| {
        let original = tensors.insert(name.to_string(), value).unwrap();
        let file = dir.path().join("changed.safetensors");
        candle::safetensors::save(&tensors, &file).unwrap();
        tensors.insert(name.to_string(), original.clone());
        (minimax_decode::run(&args(file.to_str().unwrap())).unwrap(), original)
    };
    let greedy = candle::safetensors::load(fixture().join("expected.safetensors"), &Device::Cpu).unwrap()["greedy.0"].clone();
    let (passes, _) = verdict("greedy.0", greedy.clone());
    assert!(passes);
    let mut wrong: Vec<i32> = greedy.to_vec1().unwrap();
    wrong[12] ^= 1;
    let (passes, _) = verdict("greedy.0", Tensor::new(wrong, &Device::Cpu).unwrap());
    assert!(!passes);
    let logits = candle::safetensors::load(fixture().join("expected.safetensors"), &Device::Cpu).unwrap()["decode_logits.0"].clone();
    let (passes, _) = verdict("decode_logits.0", (logits + 3e-3).unwrap());
    assert!(!passes);
}

#[test]
fn a_bare_text_config_is_read_and_its_missing_dtype_hinted_at() {
    let text = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let whole = Config::from_json(&text).unwrap();
    let mut bare = serde_json::from_str::<serde_json::Value>(&text).unwrap()["text_config"].take();
    let args = |more: &str| Args::parse_from(format!("minimax_decode --model m --check f{more}").split(' '));
    let config = Config::from_json(&bare.to_string()).unwrap();
    assert_eq!(config, Config { bf16: false, ..whole.clone() });
    assert!(minimax_decode::failed_check_hint(&args(""), &config).unwrap().contains("--rope bf16"));
    assert!(minimax_decode::failed_check_hint(&args(" --rope f32"), &config).is_none());
    assert!(minimax_decode::failed_check_hint(&args(""), &whole).is_none());
    bare["torch_dtype"] = "bfloat16".into();
    assert_eq!(Config::from_json(&bare.to_string()).unwrap(), whole);
    assert_eq!(Config::from_json(&serde_json::json!({ "text_config": bare }).to_string()).unwrap(), whole);
}

#[test]
fn verify_gives_the_tokens_of_token_by_token() {
    let model = random_model(2);
    let requests = requests(5, 300, 40);
    let sampled = Sampling { temperature: 0.3, top_p: 0.95, top_k: 20, seed: 5 };
    for sampling in [Sampling::greedy(), sampled] {
        let (plain, _) = run(&model, &requests, ServeOptions { sampling, ..options(512, 1) });
        let (verified, stats) = run(&model, &requests, ServeOptions { sampling, ..options(512, 4) });
        assert_eq!(tokens(&plain), tokens(&verified));
        assert!(worst_difference(&plain, &verified) < 1e-4);
        assert!(stats.accepted > 0 && stats.accepted < stats.drafted, "{stats:?}");
    }
}

#[test]
fn chunked_prefill_is_one_prefill() {
    let model = random_model(4);
    let requests = requests(3, 500, 6);
    let (whole, _) = run(&model, &requests, options(2000, 1));
    let (chunked, stats) = run(&model, &requests, options(70, 1));
    assert_eq!(tokens(&whole), tokens(&chunked));
    assert!(worst_difference(&whole, &chunked) < 1e-4);
    assert!(stats.prefill.steps > 20, "{stats:?}");
}

#[test]
fn requests_wait_for_pages() {
    let model = random_model(5);
    let requests = requests(4, 300, 5);
    let (roomy, _) = run(&model, &requests, options(512, 1));
    let (tight, stats) = run(&model, &requests, ServeOptions { pages: Some(4), ..options(512, 1) });
    assert_eq!(tokens(&roomy), tokens(&tight));
    assert_eq!(stats.prefill.steps, 4);
    let error = serve(&model, &requests, ServeOptions { pages: Some(2), ..options(512, 1) }, |_| {}).unwrap_err().to_string();
    assert!(error.contains("needs 3") && error.contains("has 2"), "{error}");
}

#[test]
fn a_stop_token_ends_a_sequence() {
    let model = random_model(2);
    let mut requests = requests(2, 50, 20);
    let (free, _) = run(&model, &requests, options(512, 4));
    let stop = free[0].tokens[4];
    requests[0].stop_tokens = vec![stop];
    let (stopped, _) = run(&model, &requests, options(512, 4));
    let end = free[0].tokens.iter().position(|&token| token == stop).unwrap();
    assert_eq!(stopped[0].tokens, free[0].tokens[..=end]);
    assert_eq!(stopped[1].tokens, free[1].tokens);
}

#[test]
fn wrong_requests_and_pages_are_named() {
    let model = random_model(1);
    let refusal = |request: Request, options: ServeOptions| serve(&model, &[request], options, |_| {}).unwrap_err().to_string();
    let request = |prompt: Vec<u32>, max_new_tokens| Request { prompt, max_new_tokens, stop_tokens: vec![] };
    assert!(refusal(request(vec![], 1), options(512, 1)).contains("empty prompt"));
    assert!(refusal(request(vec![1, 128], 1), options(512, 1)).contains("token 128 at 1"));
    assert!(refusal(request(vec![1], 70000), options(512, 1)).contains("max_position_embeddings"));
    let error = refusal(request(vec![1], 1), ServeOptions { page_size: 64, ..options(512, 1) });
    assert!(error.contains("page_size: 64") && error.contains("128"), "{error}");
}

/// A copy of the fixture as one file of `tensors`, which `change` may spoil.
fn error_of(change: impl FnOnce(&mut HashMap<String, Tensor>)) -> String {
    let mut tensors = HashMap::new();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        tensors.extend(candle::safetensors::load(fixture().join(shard), &Device::Cpu).unwrap());
    }
    change(&mut tensors);
    let dir = tempfile::tempdir().unwrap();
    candle::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    std::fs::copy(fixture().join("config.json"), dir.path().join("config.json")).unwrap();
    load(dir.path(), DType::F32).err().map(|error| format!("{error:#}")).unwrap_or_default()
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let norm = "language_model.model.layers.2.self_attn.q_norm.weight";
    assert_eq!(error_of(|_| {}), "");
    assert!(error_of(|t| drop(t.remove(norm))).contains(&format!("missing tensor {norm}")));
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let error = error_of(|t| drop(t.insert(norm.into(), zeros(&[63], DType::BF16))));
    assert!(error.contains(norm) && error.contains("[63]") && error.contains("[64]"), "{error}");
    let error = error_of(|t| drop(t.insert(norm.into(), zeros(&[64], DType::I64))));
    assert!(error.contains(norm) && error.contains("I64"), "{error}");
    let extra = "language_model.model.layers.4.input_layernorm.weight";
    assert!(error_of(|t| drop(t.insert(extra.into(), zeros(&[128], DType::BF16)))).contains(&format!("extra tensor {extra}")));
    assert!(error_of(|t| drop(t.insert("stray".into(), zeros(&[1], DType::BF16)))).contains("extra tensor stray"));
    assert_eq!(error_of(|t| drop(t.insert("vision_tower.patch.weight".into(), zeros(&[1], DType::BF16)))), "");
}

#[test]
fn broken_files_are_named() {
    let with = |file: &str, bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture()).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        std::fs::write(dir.path().join(file), bytes).unwrap();
        load(dir.path(), DType::F32).err().map(|error| format!("{error:#}")).unwrap()
    };
    assert!(with("config.json", b"{").contains("config.json"));
    assert!(with("model.safetensors.index.json", b"[]").contains("model.safetensors.index.json"));
    assert!(with("model-00002-of-00002.safetensors", b"short").contains("model-00002-of-00002.safetensors"));
    let shard = std::fs::read(fixture().join("model-00001-of-00002.safetensors")).unwrap();
    assert!(with("model-00002-of-00002.safetensors", &shard).contains("is in both"));
    let config = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(config.contains(from));
        with("config.json", config.replace(from, to).as_bytes())
    };
    assert!(changed("\"head_dim\": 64,", "").contains("head_dim"));
    assert!(changed("\"sparse_num_index_heads\": 2", "\"sparse_num_index_heads\": 3").contains("sparse_num_index_heads: 3"));
    assert!(changed("\"scoring_func\": \"sigmoid\"", "\"scoring_func\": \"softmax\"").contains("scoring_func"));
    assert!(changed("\"use_gemma_norm\": true", "\"use_gemma_norm\": false").contains("use_gemma_norm"));
    assert!(changed("\"hidden_size\": 128", "\"hidden_size\": 1e30").contains("config.json"));
    assert!(changed("\"hidden_size\": 128", "\"hidden_size\": 9223372036854775807").contains("hidden_size: 9223372036854775807"));
    assert!(changed("\"minimax_m3_vl\"", "\"llama\"").contains("model_type: \"llama\""));
    assert!(changed("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5").contains("4 entries for num_hidden_layers 5"));
}

#[test]
fn the_command_line_runs_each_mode() {
    let run = |line: &str| minimax_decode::run(&Args::try_parse_from(line.split(' ')).unwrap());
    assert!(run("minimax_decode --batch 2 --context 140 --steps 12 --json").unwrap());
    assert!(run("minimax_decode --attention-only --shape review/W4 --json").unwrap());
    assert!(run("minimax_decode --batch 1 --context 1 --steps 1").unwrap());
    assert!(run("minimax_decode --chunk 1 --context 6 --steps 2 --batch 1").unwrap());
}

#[test]
fn sizes_that_cannot_be_are_refused_before_anything_is_made() {
    let error = |line: &str| {
        let args = format!("minimax_decode {line}");
        format!("{:#}", minimax_decode::run(&Args::try_parse_from(args.split(' ')).unwrap()).unwrap_err())
    };
    let names = |line: &str, fragments: &[&str]| {
        let message = error(line);
        fragments.iter().for_each(|fragment| assert!(message.contains(fragment), "{line}: {message}"));
    };
    #[cfg(not(feature = "rocm"))]
    names("--backend rocm", &["rocm"]);
    names("--page-size 64", &["--page-size: 64", "128"]);
    names("--page-size 0", &["--page-size"]);
    names("--mtp 17", &["--mtp: 17"]);
    names("--mtp 4 --chunk 2", &["--mtp: 4", "--chunk 2"]);
    names("--temperature=-1", &["temperature"]);
    for size in ["99999999999999", "18446744073709551615"] {
        names(&format!("--steps {size}"), &["--steps", "max_position_embeddings is 65536"]);
        names(&format!("--context {size}"), &["--context", "max_position_embeddings is 65536"]);
        names(&format!("--batch {size}"), &["--batch", size, "memory"]);
        names(&format!("--requests {size}"), &["requests", size, "memory"]);
    }
    names("--attention-only --shape minimax20/none", &["--shape", "none", "minimax20/decode-b4-q1-ctx8192-bf16"]);
    names("--attention-only --shape minimax20", &["--shape", "minimax20/decode-b4-q1-ctx8192-bf16"]);
    names("--attention-only", &["--shape", "review/R7", "minimax20/decode-b4-q1-ctx8192-bf16"]);
}

#[test]
fn options_without_effect_are_refused() {
    let refused = |line: &str, option: &str| {
        let error = Args::try_parse_from(line.split(' ').chain(option.split(' '))).unwrap_err().to_string();
        assert!(error.contains("cannot be used with") && error.contains(option.split(' ').next().unwrap()), "{option}: {error}");
    };
    for option in ["--batch 2", "--context 9", "--steps 9", "--requests 2", "--temperature 1", "--top-k 1", "--top-p 0.5"] {
        refused("minimax_decode --attention-only --shape review/W4", option);
        refused("minimax_decode --model m --check f", option);
    }
    for option in ["--mtp 2", "--chunk 9", "--page-size 16", "--dtype bf16", "--rope bf16"] {
        refused("minimax_decode --attention-only --shape review/W4", option);
    }
}

#[test]
fn the_rotation_outgrows_every_cache() {
    let workload = testkit::workloads::find("review/W4").unwrap();
    for kind in [KvKind::Bf16, KvKind::Fp8PerToken, KvKind::Mxfp4] {
        let times = minimax_decode::attention_only::run(&workload, kind, 0, &Device::Cpu).unwrap();
        assert!(times.rotation_bytes() >= 1 << 30, "{kind:?}: {} caches of {} bytes", times.caches, times.kv_bytes);
    }
}
