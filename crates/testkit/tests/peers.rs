//! What benches compare does the same work: the crate and candle's own attention agree on a workload's call.

use candle_paged_attn::cache::KvDtype;
use testkit::peers::Peers;
use testkit::rotation::Rotation;
use testkit::workloads::{Workload, find};

fn small(query_len: usize, kv_heads: usize) -> Workload {
    let workload = find("random24/random-b64-q1-128-2048-bf16").unwrap();
    Workload { batch: 3, query_len, num_kv_heads: kv_heads, num_q_heads: 4 * kv_heads, page_size: 16, ..workload }
}

#[test]
fn the_peers_compute_the_same_attention() {
    for (query_len, kv_heads) in [(1, 1), (1, 2), (4, 1), (4, 2)] {
        for (kv, tolerance) in [(KvDtype::F32, 1e-4), (KvDtype::F16, 1e-3), (KvDtype::Bf16, 5e-3), (KvDtype::Fp8, 5e-3)] {
            let rotation = Rotation::new(&small(query_len, kv_heads), kv, 0, 7).unwrap();
            let peers = Peers::new(&rotation, 2).unwrap();
            for turn in 0..3 {
                let decoded = rotation.decode(turn).unwrap();
                for outs in [peers.candle_nn(turn).unwrap(), peers.matmul_softmax(turn).unwrap()] {
                    let difference = peers.difference(turn, &outs, &decoded).unwrap();
                    assert!(difference < tolerance, "{kv:?}, {query_len} rows, {kv_heads} KV heads: {difference}");
                }
            }
        }
    }
}

#[test]
fn a_rotation_spans_what_it_was_asked_to() {
    let workload = find("review/R2").unwrap();
    let rotation = Rotation::new(&workload, workload.kv_dtype(), 20 << 20, 1).unwrap();
    assert_eq!(rotation.kv_bytes(), workload.kv_bytes());
    assert_eq!(rotation.turns(), (20usize << 20).div_ceil(workload.kv_bytes()));
    let pages: usize = workload.pages().iter().sum::<usize>() * rotation.turns();
    let mut ids: Vec<u32> = rotation.block_tables.iter().flat_map(|t| t.flatten_all().unwrap().to_vec1().unwrap()).collect();
    ids.retain(|&id| id != u32::MAX);
    ids.sort();
    assert_eq!(ids, (0..pages as u32).collect::<Vec<_>>(), "every page is in one table once");
}
