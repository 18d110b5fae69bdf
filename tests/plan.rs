//! The planner against hand-computed records and against naive restatements of its rules.

use std::time::Instant;

use candle::{DType, Device, Tensor};
use candle_paged_attn::plan::{
    DecodePlan, HostPlan, MAX_SLOTS, MinMaxRule, PADDING, PLANNER_THREADS, PlanRequest, PlannerBlock, ProportionalRule, Split, TILE_TOKENS,
    TileRange, batch_bucket, capacity, default_budget, tile_bound, tile_range,
};
use candle_paged_attn::registry::{Arch, ArchName, CpuIsa};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

const ARCHS: [ArchName; 7] = [
    ArchName::Cpu(CpuIsa::Portable),
    ArchName::Gfx942,
    ArchName::Gfx950,
    ArchName::Gfx1250,
    ArchName::Sm80,
    ArchName::Sm89,
    ArchName::Sm90,
];

fn arch_with(name: ArchName, compute_units: usize) -> Arch {
    let (lds_bytes, wave_size) = match name {
        ArchName::Cpu(_) => (0, 1),
        ArchName::Gfx942 => (64 << 10, 64),
        ArchName::Gfx950 => (160 << 10, 64),
        ArchName::Gfx1250 => (320 << 10, 32),
        ArchName::Sm80 | ArchName::Sm89 | ArchName::Sm90 => (100 << 10, 32),
    };
    Arch { name, compute_units, lds_bytes, wave_size }
}

fn arch(name: ArchName) -> Arch {
    arch_with(name, 256)
}

/// Context lengths of whole tiles.
fn tokens(tiles: &[i32]) -> Vec<i32> {
    tiles.iter().map(|t| t * TILE_TOKENS as i32).collect()
}

/// A decode batch over one KV head with a budget.
fn budgeted(context_lens: &[i32], budget: usize) -> PlanRequest<'_> {
    PlanRequest { workgroup_budget: Some(budget), ..PlanRequest::new(context_lens, &[1], 1) }
}

/// Whether each tile that a row needs is in exactly one task and no other tile is in any, told by counting.
fn covers_by_counting(plan: &HostPlan, request: &PlanRequest<'_>, arch: &Arch) -> bool {
    let needed: Vec<TileRange> = request.tile_ranges(arch).collect();
    let mut seen: Vec<Vec<u32>> = needed.iter().map(|range| vec![0; range.end as usize]).collect();
    for &[row, first, end, _] in &plan.work {
        for tile in if row == -1 { 0..0 } else { first..end } {
            match seen.get_mut(row as usize).and_then(|tiles| tiles.get_mut(tile as usize)) {
                Some(count) => *count += 1,
                None => return false,
            }
        }
    }
    needed
        .iter()
        .zip(&seen)
        .all(|(range, tiles)| tiles.iter().enumerate().all(|(tile, &count)| count == u32::from(tile as i32 >= range.first)))
}

/// Checks everything but the counts: packing, tile boundaries, padding, reduce records.
fn assert_well_formed(plan: &HostPlan, request: &PlanRequest<'_>, arch: &Arch, slots: usize) {
    assert_eq!(plan.work.len(), slots);
    assert_eq!(plan.reduce.len(), request.rows());
    let ranges: Vec<TileRange> = request.tile_ranges(arch).collect();
    let longest = |row: usize| ranges[row].tiles().div_ceil(plan.reduce[row][1].max(1) as u32).min((1 << 24) - 1);
    let mut rows: Vec<usize> = (0..ranges.len()).collect();
    if arch.name.is_cuda() {
        rows.sort_by_key(|&row| std::cmp::Reverse(longest(row)));
    }
    let mut slot = 0usize;
    for row in rows {
        let range = ranges[row];
        let [first, count] = plan.reduce[row];
        assert_eq!(first as usize, slot, "row {row}");
        assert_eq!(count == 0, range.tiles() == 0, "row {row}");
        if let Some(most) = request.max_partitions {
            assert!(count as usize <= most, "row {row}");
        }
        let start = |task: i32| range.first + (i64::from(task) * i64::from(range.end - range.first) / i64::from(count)) as i32;
        for task in 0..count {
            assert_eq!(plan.work[slot], [row as i32, start(task), start(task + 1), task], "slot {slot}");
            assert!(start(task) < start(task + 1), "slot {slot}");
            slot += 1;
        }
    }
    assert!(plan.work[slot..].iter().all(|&record| record == PADDING));
    plan.check_covers(request, arch).unwrap();
}

/// T by trying every bound upward from ceil(total / capacity); `None` where nothing is searched.
fn bound_by_scan(tiles: &[u32], slots: usize, max_partitions: u32) -> Option<u128> {
    let total: u128 = tiles.iter().map(|&t| u128::from(t)).sum();
    let rows = tiles.iter().filter(|&&t| t > 0).count();
    if rows == 0 || rows == slots {
        return None;
    }
    let top = total.div_ceil((slots - rows) as u128);
    let fits =
        |bound: u128| tiles.iter().map(|&t| u128::from(t).div_ceil(bound).min(u128::from(max_partitions))).sum::<u128>() <= slots as u128;
    Some((total.div_ceil(slots as u128)..=top).find(|&bound| fits(bound)).expect("the top always fits"))
}

fn tasks_of(plan: &HostPlan) -> Vec<i32> {
    plan.reduce.iter().map(|&[_, count]| count).collect()
}

#[test]
fn minmax_records_by_hand() {
    // 16 tiles in 8 slots: T = 2 fits exactly.
    let lens = [1024, 0, 300, 2560];
    let plan = HostPlan::new(&budgeted(&lens, 8), &arch(ArchName::Gfx942)).unwrap();
    let row_3 = [[3, 0, 2, 0], [3, 2, 4, 1], [3, 4, 6, 2], [3, 6, 8, 3], [3, 8, 10, 4]];
    assert_eq!(plan.work, [&[[0, 0, 2, 0], [0, 2, 4, 1], [2, 0, 2, 0]][..], &row_3].concat());
    assert_eq!(plan.reduce, [[0, 2], [2, 0], [2, 1], [3, 5]]);

    // 7 and 1 tiles in 4 slots: T = 2 wants 5, T = 3 fits. Three tasks of 7 tiles start at 0, 2 and 4.
    let plan = HostPlan::new(&budgeted(&tokens(&[7, 1]), 4), &arch(ArchName::Gfx950)).unwrap();
    assert_eq!(plan.work, [[0, 0, 2, 0], [0, 2, 4, 1], [0, 4, 7, 2], [1, 0, 1, 0]]);
    assert_eq!(plan.reduce, [[0, 3], [3, 1]]);

    // Equal lengths use fewer slots than there are.
    let plan = HostPlan::new(&budgeted(&tokens(&[4, 4, 4]), 8), &arch(ArchName::Gfx950)).unwrap();
    assert_eq!(plan.work[..6], [[0, 0, 2, 0], [0, 2, 4, 1], [1, 0, 2, 0], [1, 2, 4, 1], [2, 0, 2, 0], [2, 2, 4, 1]]);
    assert_eq!(plan.work[6..], [PADDING; 2]);
    assert_eq!(plan.reduce, [[0, 2], [2, 2], [4, 2]]);
    assert_eq!((plan.capacity(), plan.tasks()), (8, 6));
    // The same tokens are twice as many tiles on NVIDIA GPUs, and 300 tokens are 3.
    let plan = HostPlan::new(&budgeted(&[1024, 300], 6), &arch(ArchName::Sm90)).unwrap();
    assert_eq!(plan.work, [[0, 0, 2, 0], [0, 2, 4, 1], [0, 4, 6, 2], [0, 6, 8, 3], [1, 0, 1, 0], [1, 1, 3, 1]]);

    // A window of 300 before a verify of 4 at 1000: the first query, at 996, starts at token 697, in tile 2.
    let request = PlanRequest { window: Some(300), ..PlanRequest::new(&[1000], &[4], 1) };
    let plan = HostPlan::new(&request, &arch_with(ArchName::Gfx942, 1)).unwrap();
    assert_eq!(plan.work, [[0, 2, 3, 0], [0, 3, 4, 1]]);

    // A full plan has one task a row; a partition limit leaves slots free that other rows take.
    let plan = HostPlan::new(&budgeted(&tokens(&[9, 1]), 1), &arch(ArchName::Gfx942)).unwrap();
    assert_eq!(plan.work, [[0, 0, 9, 0], [1, 0, 1, 0]]);
    let request = PlanRequest { max_partitions: Some(2), ..budgeted(&[25600, 1024], 4) };
    let plan = HostPlan::new(&request, &arch(ArchName::Gfx942)).unwrap();
    // The search starts at ceil(104 / 4) = 26, above the short row's 4 tiles.
    assert_eq!(plan.work, [[0, 0, 50, 0], [0, 50, 100, 1], [1, 0, 4, 0], PADDING]);
}

#[test]
fn proportional_records_by_hand() {
    // Two spare slots over 8 tiles: 7 tiles get floor(14 / 8) = 1 of them.
    let plan = HostPlan::new(&budgeted(&tokens(&[7, 0, 1]), 4), &arch(ArchName::Gfx1250)).unwrap();
    assert_eq!(plan.work, [[0, 0, 3, 0], [0, 3, 7, 1], [2, 0, 1, 0], PADDING]);
    assert_eq!(plan.reduce, [[0, 2], [2, 0], [2, 1]]);

    // 10 spare slots over 16 tiles: 1 + 7, and 1 + 2 but for the partition limit.
    let lens = tokens(&[12, 4]);
    let request = PlanRequest { max_partitions: Some(6), ..budgeted(&lens, 12) };
    assert_eq!(tasks_of(&HostPlan::new(&request, &arch(ArchName::Gfx1250)).unwrap()), [6, 3]);
    // Never more tasks than tiles.
    assert_eq!(tasks_of(&HostPlan::new(&budgeted(&tokens(&[2, 1]), 512), &arch(ArchName::Gfx1250)).unwrap()), [2, 1]);
}

#[test]
fn proportional_shares_follow_tiles_in_random_batches() {
    let mut rng = StdRng::seed_from_u64(3);
    for _ in 0..500 {
        let rows = rng.random_range(1..600);
        let lens: Vec<i32> = (0..rows).map(|_| rng.random_range(-10..100_000)).collect();
        let most = rng.random_bool(0.5).then(|| rng.random_range(1..20));
        let request = PlanRequest { max_partitions: most, ..budgeted(&lens, rng.random_range(1..2000)) };
        let arch = arch(ArchName::Gfx1250);
        let slots = capacity(&request, &arch).unwrap();
        let plan = HostPlan::new(&request, &arch).unwrap();
        assert_well_formed(&plan, &request, &arch, slots);
        let tiles: Vec<i128> = request.tile_ranges(&arch).map(|range| i128::from(range.tiles())).collect();
        let spare = slots as i128 - tiles.iter().filter(|&&t| t > 0).count() as i128;
        let total: i128 = tiles.iter().sum();
        for (row, &t) in tiles.iter().enumerate() {
            // count - 1 is the largest whole number at most spare * t / total, or a limit cut in.
            let count = i128::from(plan.reduce[row][1]);
            let limit = t.min(most.unwrap_or(usize::MAX) as i128);
            assert!(count <= limit && (t == 0 || (count - 1) * total <= spare * t), "row {row}: {count} of {t} tiles");
            assert!(count == limit || count * total > spare * t, "row {row}: {count} of {t} tiles");
        }
    }
}

#[test]
fn minmax_shortens_the_longest_task() {
    let mut rng = StdRng::seed_from_u64(32);
    let lens: Vec<i32> = (0..32).map(|_| rng.random_range(1024..8192)).collect();
    let request = PlanRequest::new(&lens, &[1], 8);
    let longest = |split| {
        let plan = HostPlan::with_split(&request, &arch(ArchName::Gfx950), split).unwrap();
        plan.check_covers(&request, &arch(ArchName::Gfx950)).unwrap();
        plan.work.iter().map(|record| record[2] - record[1]).max().unwrap()
    };
    assert!(longest(Split::MinMax) < longest(Split::Proportional), "{} {}", longest(Split::MinMax), longest(Split::Proportional));
}

#[test]
fn bound_equals_the_scan() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut searched = 0;
    for case in 0..2000 {
        let rows = rng.random_range(1..=if case % 4 == 0 { 256 } else { 12 });
        let longest = [1, 3, 40, 900][case % 4];
        let tiles: Vec<u32> = (0..rows).map(|_| if rng.random_bool(0.2) { 0 } else { rng.random_range(1..=longest) }).collect();
        let slots = rows + if rng.random_bool(0.3) { rng.random_range(0..3) } else { rng.random_range(0..3 * rows + 8) };
        let most = if rng.random_bool(0.4) { rng.random_range(1..6) } else { u32::MAX };
        let bound = tile_bound(tiles.iter().copied(), slots, most);
        match bound_by_scan(&tiles, slots, most) {
            // The scan may stop above the longest row, where every bound means one task a row.
            Some(expected) => {
                searched += 1;
                let longest = u128::from(*tiles.iter().max().unwrap());
                assert_eq!(u128::from(bound), expected.min(longest), "{tiles:?} in {slots} slots of {most}");
            }
            None => assert_eq!(bound, i32::MAX as u32, "{tiles:?} in {slots} slots"),
        }
    }
    assert!(searched > 1500, "{searched} cases searched");
}

#[test]
fn random_minmax_plans_have_the_scanned_counts() {
    let mut rng = StdRng::seed_from_u64(2);
    for case in 0..600 {
        let name = ARCHS[case % ARCHS.len()];
        let rows = rng.random_range(0..=PLANNER_THREADS);
        let extreme = [0, -1, i32::MIN, 1, 255, 256, 257];
        let lens: Vec<i32> =
            (0..rows).map(|_| if rng.random_bool(0.2) { extreme[rng.random_range(0..7)] } else { rng.random_range(1..200_000) }).collect();
        let ragged: Vec<usize> = (0..rows).map(|_| rng.random_range(0..20)).collect();
        let uniform = [rng.random_range(1..9)];
        let request = PlanRequest {
            context_lens: &lens,
            query_lens: if rng.random_bool(0.5) { &ragged } else { &uniform },
            kv_heads: rng.random_range(1..9),
            window: rng.random_bool(0.4).then(|| rng.random_range(1..10_000)),
            max_partitions: rng.random_bool(0.4).then(|| rng.random_range(1..10)),
            workgroup_budget: rng.random_bool(0.5).then(|| rng.random_range(1..3000)),
            max_context_len: rng.random_bool(0.5).then(|| rng.random_range(1..10_000)),
        };
        let arch = arch_with(name, rng.random_range(1..300));
        let slots = capacity(&request, &arch).unwrap();
        let plan = HostPlan::with_split(&request, &arch, Split::MinMax).unwrap();
        assert_well_formed(&plan, &request, &arch, slots);
        assert!(covers_by_counting(&plan, &request, &arch));
        if name != ArchName::Gfx1250 {
            assert_eq!(HostPlan::new(&request, &arch).unwrap(), plan, "{name:?}");
        }
        let most = request.max_partitions.map_or(u32::MAX, |most| most as u32);
        let tiles: Vec<u32> = request.tile_ranges(&arch).map(TileRange::tiles).collect();
        let expected: Vec<i32> = match bound_by_scan(&tiles, slots, most) {
            Some(bound) => tiles.iter().map(|&t| u128::from(t).div_ceil(bound).min(u128::from(most)) as i32).collect(),
            None => tiles.iter().map(|&t| i32::from(t > 0)).collect(),
        };
        assert_eq!(tasks_of(&plan), expected);
    }
}

#[test]
fn lengths_at_the_ends_of_int32() {
    // 256 rows of 2^23 tiles, 2^31 in all; twice that on NVIDIA GPUs.
    let lens = vec![i32::MAX; 256];
    for (budget, tasks) in [(1, 1), (257, 1), (511, 1), (512, 2), (1023, 3), (4096, 16)] {
        for name in ARCHS {
            let request = budgeted(&lens, budget);
            let plan = HostPlan::with_split(&request, &arch(name), Split::MinMax).unwrap();
            assert_well_formed(&plan, &request, &arch(name), budget.max(256));
            assert!(tasks_of(&plan).iter().all(|&count| count == tasks), "{budget}: {:?}", plan.reduce[0]);
            HostPlan::new(&request, &arch(name)).unwrap().check_covers(&request, &arch(name)).unwrap();
        }
    }
    assert_eq!(tile_bound(std::iter::repeat_n(1 << 23, 256), 257, u32::MAX), 1 << 23);
    // One row may take every slot of the largest plan.
    let request = budgeted(&lens[..1], MAX_SLOTS);
    assert_eq!(tasks_of(&HostPlan::new(&request, &arch(ArchName::Gfx1250)).unwrap()), [1 << 23]);
    // Empty, negative and longest rows side by side, on every arch and either side of one row a thread.
    for rows in [3, 255, 258, 600] {
        let lens: Vec<i32> = [0, -1, i32::MAX].into_iter().cycle().take(rows).collect();
        for name in ARCHS {
            for max_partitions in [None, Some(1), Some(3)] {
                let request = PlanRequest { max_partitions, ..PlanRequest::new(&lens, &[1], 1) };
                let slots = capacity(&request, &arch(name)).unwrap();
                assert_well_formed(&HostPlan::new(&request, &arch(name)).unwrap(), &request, &arch(name), slots);
            }
        }
    }
}

#[test]
fn windows_equal_a_count_of_attended_tokens() {
    let mut rng = StdRng::seed_from_u64(4);
    for _ in 0..3000 {
        let context_len = rng.random_range(-3..2600i64);
        let most_queries = if rng.random_bool(0.1) { 3000 } else { 20i64 };
        let query_len = rng.random_range(0..most_queries);
        let widest = if rng.random_bool(0.5) { 400 } else { 4000i64 };
        let window = rng.random_bool(0.8).then(|| rng.random_range(1..widest));
        let attended = (0..query_len).flat_map(|query| {
            let position = context_len - query_len + query;
            (0..context_len).filter(move |&token| token <= position && window.is_none_or(|window| token > position - window))
        });
        let (mut first, mut last) = (i64::MAX, -1);
        for token in attended {
            (first, last) = (first.min(token), last.max(token));
        }
        let expected = if last < 0 { 0..0 } else { (first / 256) as i32..(last / 256 + 1) as i32 };
        let range = tile_range(context_len as i32, query_len as usize, window.map(|window| window as usize), TILE_TOKENS);
        assert_eq!(range.first..range.end, expected, "context {context_len}, {query_len} queries, window {window:?}");
    }
}

#[test]
fn budgets_and_capacities() {
    let (gfx942, gfx950) = (arch_with(ArchName::Gfx942, 80), arch(ArchName::Gfx950));
    // (rows, query_len, kv_heads) on 256 CUs.
    for (rows, query_len, kv_heads, budget) in [
        (1, 1, 1, 512),
        (256, 1, 8, 512),
        (1, 2, 1, 256),
        (64, 4, 1, 256),
        (65, 4, 1, 260),
        (100, 4, 1, 400),
        (128, 4, 1, 512),
        (1000, 4, 1, 512),
        (16, 4, 8, 512),
        (8, 4, 8, 256),
        (1000, 2, usize::MAX, 512),
    ] {
        let (lens, query_lens) = (vec![5000; rows], [query_len]);
        let request = PlanRequest::new(&lens, &query_lens, kv_heads);
        assert_eq!(default_budget(&request, &gfx950), budget, "{rows} rows of {query_len}, {kv_heads} heads");
        assert_eq!(default_budget(&request, &gfx942), 160);
    }
    // (rows, query_len, kv_heads, max_partitions, budget) on gfx950.
    for (rows, query_len, kv_heads, max_partitions, budget, slots) in [
        (1, 1, 1, None, None, 512),
        (1, 1, 3, None, None, 171),
        (1, 1, 1, Some(7), None, 7),
        (100, 1, 8, None, None, 100),
        (10, 1, 1, Some(7), None, 70),
        (10, 1, 1, Some(1), None, 10),
        (10, 1, 1, Some(1), Some(512), 10),
        (8, 4, 1, None, None, 256),
        (8, 4, 1, None, Some(512), 512),
        (100, 4, 1, None, None, 400),
        (8, 1, 1, None, Some(1), 8),
        (8, 1, 2, None, Some(65), 33),
        (3, 1, 1, Some(usize::MAX), None, 512),
        (0, 1, 1, None, None, 0),
        (0, 4, 1, Some(1), Some(9), 0),
    ] {
        let (lens, query_lens) = (vec![5000; rows], [query_len]);
        let request = PlanRequest { max_partitions, workgroup_budget: budget, ..PlanRequest::new(&lens, &query_lens, kv_heads) };
        let shown = (rows, query_len, kv_heads, max_partitions, budget);
        assert_eq!(capacity(&request, &gfx950).unwrap(), slots, "{shown:?}");
        assert_eq!(HostPlan::new(&request, &gfx950).unwrap().capacity(), slots, "{shown:?}");
    }
    // One long query makes a verify batch.
    assert_eq!(capacity(&PlanRequest::new(&[5000; 3], &[1, 2, 1], 1), &gfx950).unwrap(), 256);
    assert_eq!(capacity(&PlanRequest::new(&[5000; 3], &[1, 1, 1], 1), &gfx950).unwrap(), 512);
}

#[test]
fn nvidia_gpus_have_one_two_or_four_slots_a_sm() {
    // (rows, kv_heads, most tokens, window, slots) on 132 SMs.
    for (rows, kv_heads, max_context_len, window, slots) in [
        (3, 1, Some(8192), None, 132),
        // No more than there may be tiles.
        (1, 1, Some(8192), None, 64),
        (1, 1, Some(8193), None, 65),
        (1, 8, Some(1024), None, 8),
        (1, 1, Some(0), None, 1),
        (44, 1, Some(8192), None, 132),
        (45, 1, Some(8192), None, 264),
        (66, 1, None, None, 264),
        (66, 1, Some(2048), None, 132),
        (67, 1, Some(2048), None, 264),
        (67, 1, Some(4096), None, 528),
        (256, 1, None, None, 528),
        // Many short rows are kept whole.
        (188, 1, Some(4095), None, 264),
        (189, 1, Some(4095), None, 189),
        (256, 1, Some(2048), None, 256),
        (256, 1, None, Some(2048), 256),
        (1000, 1, Some(2048), None, 1000),
        // Where a row's tasks run for several KV heads, pairs count and share the slots.
        (5, 8, Some(8192), None, 17),
        (8, 8, Some(8192), None, 33),
        (8, 8, Some(2048), None, 17),
        (16, 8, Some(8192), None, 66),
        (32, 8, Some(8192), None, 66),
        (16, 8, Some(2048), None, 33),
        (32, 8, Some(2048), None, 32),
    ] {
        let lens = vec![5000; rows];
        let request = PlanRequest { max_context_len, window, ..PlanRequest::new(&lens, &[1], kv_heads) };
        let shown = (rows, kv_heads, max_context_len, window);
        assert_eq!(capacity(&request, &Arch::sm90()).unwrap(), slots, "{shown:?}");
    }
    for (rows, slots) in [(8, 132), (59, 132), (60, 264), (132, 264), (133, 528)] {
        let lens = vec![5000; rows];
        let verify = PlanRequest::new(&lens, &[4], 1);
        assert_eq!(capacity(&verify, &Arch::sm90()).unwrap(), slots, "{rows} rows of 4 new tokens");
    }
    // Short ones are kept whole from fewer on.
    for (rows, slots) in [(67, 264), (115, 264), (116, 116), (256, 256)] {
        let lens = vec![2000; rows];
        let short = PlanRequest { max_context_len: Some(2048), ..PlanRequest::new(&lens, &[4], 1) };
        assert_eq!(capacity(&short, &Arch::sm90()).unwrap(), slots, "{rows} short rows of 4 new tokens");
    }
}

/// Unless a row is empty, whose slot is the longest one's then.
#[test]
fn many_short_rows_are_kept_whole() {
    let mut lens = vec![500; 200];
    lens[..10].fill(2000);
    let request = PlanRequest { max_context_len: Some(2048), ..PlanRequest::new(&lens, &[1], 1) };
    let plan = HostPlan::new(&request, &Arch::sm90()).unwrap();
    assert_eq!((plan.capacity(), plan.tasks(), plan.is_one_task_a_row()), (200, 200, true));
    let mut few = lens.clone();
    few[20..].fill(0);
    let plan = HostPlan::new(&PlanRequest { context_lens: &few, ..request.clone() }, &Arch::sm90()).unwrap();
    assert!(plan.tasks() > 100 && !plan.is_one_task_a_row(), "{} tasks of 20 rows", plan.tasks());
    // But where the caller says how rows are split.
    for (max_partitions, workgroup_budget) in [(Some(2), None), (None, Some(264))] {
        let split = PlanRequest { max_partitions, workgroup_budget, ..request.clone() };
        let plan = HostPlan::new(&split, &Arch::sm90()).unwrap();
        assert_eq!((plan.capacity(), plan.is_one_task_a_row()), (264, false), "{split:?}");
    }
    let verify = PlanRequest { query_lens: &[4], ..request.clone() };
    assert!(HostPlan::new(&verify, &Arch::sm90()).unwrap().is_one_task_a_row());
    let elsewhere = HostPlan::new(&request, &arch(ArchName::Gfx950)).unwrap();
    assert!(elsewhere.capacity() > 200);
}

#[test]
fn one_partition_is_one_slot_a_row() {
    let mut rng = StdRng::seed_from_u64(5);
    for name in ARCHS {
        for rows in [1, 5, 256, 257, 700] {
            let lens: Vec<i32> = (0..rows).map(|_| if rng.random_bool(0.3) { 0 } else { rng.random_range(1..1_000_000) }).collect();
            let request = PlanRequest { max_partitions: Some(1), ..PlanRequest::new(&lens, &[1], 2) };
            let plan = HostPlan::new(&request, &arch(name)).unwrap();
            assert_well_formed(&plan, &request, &arch(name), rows);
            let tasks: Vec<i32> = lens.iter().enumerate().filter(|&(_, &len)| len > 0).map(|(row, _)| row as i32).collect();
            let mut packed: Vec<i32> = plan.work.iter().map(|record| record[0]).take(tasks.len()).collect();
            packed.sort_unstable();
            assert_eq!(packed, tasks);
        }
    }
}

#[test]
fn each_arch_has_its_split() {
    for (name, within, beyond) in [
        (ArchName::Gfx942, Split::MinMax, Split::Proportional),
        (ArchName::Gfx950, Split::MinMax, Split::Proportional),
        (ArchName::Gfx1250, Split::Proportional, Split::Proportional),
        (ArchName::Cpu(CpuIsa::AmxBf16), Split::MinMax, Split::MinMax),
        (ArchName::Sm80, Split::MinMax, Split::MinMax),
        (ArchName::Sm89, Split::MinMax, Split::MinMax),
        (ArchName::Sm90, Split::MinMax, Split::MinMax),
    ] {
        let arch = arch(name);
        assert_eq!((Split::of(256, &arch), Split::of(257, &arch)), (within, beyond), "{name:?}");
        let mut rng = StdRng::seed_from_u64(6);
        let lens: Vec<i32> = (0..257).map(|_| rng.random_range(1..50_000)).collect();
        for (rows, split) in [(256, within), (257, beyond)] {
            let request = budgeted(&lens[..rows], 600);
            let [chosen, minmax, proportional] = [None, Some(Split::MinMax), Some(Split::Proportional)].map(|split| match split {
                None => HostPlan::new(&request, &arch).unwrap(),
                Some(split) => HostPlan::with_split(&request, &arch, split).unwrap(),
            });
            assert_ne!(minmax, proportional);
            assert_eq!(chosen == minmax, split == Split::MinMax, "{name:?} {rows}");
            assert_eq!(chosen == proportional, split == Split::Proportional, "{name:?} {rows}");
        }
    }
}

#[test]
fn planner_blocks() {
    assert_eq!([0, 1, 2, 3, 256, 257].map(batch_bucket), [1, 1, 2, 4, 256, 512]);
    assert_eq!(batch_bucket(usize::MAX), usize::MAX);
    let block = PlannerBlock::new(200, &arch(ArchName::Gfx942)).unwrap();
    assert_eq!(block, PlannerBlock { bucket: 256, threads: 256, lds_bytes: 256 * 12 + 4 * 8 });
    // 4096 rows fit 64 KiB, the next bucket does not; it fits 160 KiB.
    assert!(PlannerBlock::new(4096, &arch(ArchName::Gfx942)).is_ok());
    let error = PlannerBlock::new(4097, &arch(ArchName::Gfx942)).unwrap_err().to_string();
    assert!(error.contains("4097") && error.contains("8192") && error.contains("98336") && error.contains("65536"), "{error}");
    assert_eq!(PlannerBlock::new(4097, &arch(ArchName::Gfx950)).unwrap().bucket, 8192);
    let exact = Arch { lds_bytes: 256 * 12 + 4 * 8, ..arch(ArchName::Gfx942) };
    assert!(PlannerBlock::new(256, &exact).is_ok());
    assert!(PlannerBlock::new(256, &Arch { lds_bytes: exact.lds_bytes - 1, ..exact }).is_err());
    assert!(PlannerBlock::new(usize::MAX, &arch(ArchName::Gfx950)).is_err());
    assert!(PlannerBlock::new(1, &arch(ArchName::Cpu(CpuIsa::Neon))).unwrap_err().to_string().contains("host"));
}

#[test]
fn the_rules_alone() {
    let rule = MinMaxRule { bound: 4, max_partitions: 3 };
    assert_eq!([0, 1, 4, 5, 8, 9, 100].map(|t| rule.tasks(t)), [0, 1, 1, 2, 2, 3, 3]);
    assert_eq!(MinMaxRule { bound: 0, max_partitions: 3 }.tasks(2), 2);
    let rule = ProportionalRule::new([6, 0, 2].into_iter(), 6, 5);
    assert_eq!(rule, ProportionalRule { spare: 4, total: 8, max_partitions: 5 });
    assert_eq!([0, 2, 6].map(|t| rule.tasks(t)), [0, 2, 4]);
    assert_eq!(ProportionalRule { spare: u64::MAX, total: 0, max_partitions: u32::MAX }.tasks(u32::MAX), u32::MAX);
    assert_eq!(tile_bound([].into_iter(), 0, 1), i32::MAX as u32);
    assert_eq!(tile_bound([0, 0].into_iter(), 9, 1), i32::MAX as u32);
}

#[test]
fn the_free_split_has_one_task_a_row_in_its_own_slot() {
    let request = PlanRequest { window: Some(300), ..PlanRequest::new(&[1000, 0, 70, -1, i32::MAX], &[4], 1) };
    let arch = arch(ArchName::Gfx950);
    let plan = HostPlan::free(&request, &arch);
    let last = tile_range(i32::MAX, 4, Some(300), TILE_TOKENS);
    assert_eq!(plan.work, [[0, 2, 4, 0], PADDING, [2, 0, 1, 0], PADDING, [4, last.first, 1 << 23, 0]]);
    assert_eq!(plan.reduce, [[0, 1], [1, 0], [2, 1], [3, 0], [4, 1]]);
    plan.check_covers(&request, &arch).unwrap();
    assert_eq!(HostPlan::free(&PlanRequest::new(&[], &[1], 1), &arch), HostPlan { work: vec![], reduce: vec![] });
    // A request that is short of query lengths leaves nothing out.
    let request = PlanRequest { window: Some(1), ..PlanRequest::new(&[1000, 1000, 1000], &[1, 1], 1) };
    assert_eq!(HostPlan::free(&request, &arch).work, [[0, 3, 4, 0], [1, 3, 4, 0], [2, 0, 4, 0]]);
}

#[test]
fn bad_requests_are_errors() {
    let lens = [1000, 2000];
    let good = PlanRequest::new(&lens, &[1], 1);
    let plan = HostPlan::free(&good, &arch(ArchName::Gfx950));
    for (request, words) in [
        (PlanRequest { max_partitions: Some(0), ..good.clone() }, &["max_partitions", "0"][..]),
        (PlanRequest { workgroup_budget: Some(0), ..good.clone() }, &["workgroup_budget", "0"]),
        (PlanRequest { window: Some(0), ..good.clone() }, &["window", "0"]),
        (PlanRequest { kv_heads: 0, ..good.clone() }, &["kv_heads", "0"]),
        (PlanRequest { query_lens: &[], ..good.clone() }, &["query_lens", "0 entries", "2 rows"]),
        (PlanRequest { query_lens: &[1, 1, 1], ..good.clone() }, &["query_lens", "3 entries", "2 rows"]),
    ] {
        for error in [
            HostPlan::new(&request, &arch(ArchName::Gfx950)).unwrap_err(),
            capacity(&request, &arch(ArchName::Gfx950)).unwrap_err(),
            plan.check_covers(&request, &arch(ArchName::Gfx950)).unwrap_err(),
            DecodePlan::new(&request, &arch(ArchName::Sm90), &Device::Cpu).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
    for budget in [MAX_SLOTS + 1, usize::MAX] {
        let error = HostPlan::new(&budgeted(&lens, budget), &arch(ArchName::Gfx942)).unwrap_err().to_string();
        assert!(error.contains(&budget.to_string()) && error.contains("slots"), "{error}");
    }
    assert!(capacity(&budgeted(&lens, MAX_SLOTS), &arch(ArchName::Gfx942)).is_ok());
}

#[test]
fn a_stale_plan_is_refused_by_row_and_values() {
    let made_for = [1000, 3000, 70];
    let (arch, nvidia) = (arch(ArchName::Gfx950), arch(ArchName::Sm90));
    let plan = HostPlan::new(&PlanRequest::new(&made_for, &[1], 1), &arch).unwrap();
    // The same tiles serve other lengths, and those of another arch no other.
    plan.check_covers(&PlanRequest::new(&[1024, 2817, 1], &[1], 1), &arch).unwrap();
    assert!(plan.check_covers(&PlanRequest::new(&made_for, &[1], 1), &nvidia).unwrap_err().to_string().contains("row 0"));
    for (lens, words) in [
        (&[1025, 3000, 70][..], &["row 0", "0..4", "0..5"][..]),
        (&[1000, 2816, 70], &["row 1", "0..11"]),
        (&[1000, 0, 70], &["row 1", "0..0"]),
        (&[1000, 3000, 257], &["row 2", "0..1", "0..2"]),
        (&[1000, 3000], &["3 rows", "2"]),
        (&[1000, 3000, 70, 70], &["3 rows", "4"]),
    ] {
        let error = plan.check_covers(&PlanRequest::new(lens, &[1], 1), &arch).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{lens:?}: {error}");
    }
    let windowed = PlanRequest { window: Some(100), ..PlanRequest::new(&made_for, &[1], 1) };
    assert!(plan.check_covers(&windowed, &arch).unwrap_err().to_string().contains("row 0"));
}

#[test]
fn damaged_plans_are_refused() {
    let lens = tokens(&[4, 0, 2]);
    let request = budgeted(&lens, 8);
    let good = HostPlan::new(&request, &arch(ArchName::Gfx942)).unwrap();
    assert_eq!(good.work, [[0, 0, 1, 0], [0, 1, 2, 1], [0, 2, 3, 2], [0, 3, 4, 3], [2, 0, 1, 0], [2, 1, 2, 1], PADDING, PADDING]);
    assert_eq!(good.reduce, [[0, 4], [4, 0], [4, 2]]);
    type Damage = fn(&mut HostPlan);
    let cases: [(&str, Damage, &str); 13] = [
        ("padding over a task", |plan| plan.work[1] = PADDING, "slot 1"),
        ("a gap", |plan| plan.work[1] = [0, 2, 3, 1], "slot 1"),
        ("an overlap", |plan| plan.work[1][1] = 0, "slot 1"),
        ("an empty task", |plan| plan.work[2] = [0, 2, 2, 2], "slot 2"),
        ("a task past the end", |plan| plan.work[3][2] = 5, "slot 3"),
        ("a task ending before it starts", |plan| plan.work[0][2] = i32::MIN, "slot 0"),
        ("a partition index out of order", |plan| plan.work[5][3] = 0, "slot 5"),
        ("a stray task", |plan| plan.work[6] = [1, 0, 1, 0], "slot 6"),
        ("a stray row", |plan| plan.work[7] = [-2, 0, 0, 0], "slot 7"),
        ("a count too small", |plan| plan.reduce[0][1] = 3, "row 0"),
        ("slots past the plan", |plan| plan.reduce[2] = [7, 2], "row 2"),
        ("a first slot past the plan", |plan| plan.reduce[1] = [i32::MAX, 0], "row 1"),
        ("a negative count", |plan| plan.reduce[0] = [i32::MAX, i32::MIN], "row 0"),
    ];
    for (name, damage, place) in cases {
        let mut plan = good.clone();
        damage(&mut plan);
        let error = plan.check_covers(&request, &arch(ArchName::Gfx942)).expect_err(name).to_string();
        assert!(error.contains(place), "{name}: {error}");
    }
}

fn batches() -> impl Strategy<Value = (Vec<i32>, Vec<usize>, Option<usize>, Option<usize>, usize, usize)> {
    (1usize..20).prop_flat_map(|rows| {
        (
            prop::collection::vec(prop_oneof![Just(0), Just(-1), 1..20_000], rows),
            prop::collection::vec(0usize..10, rows),
            prop::option::of(1usize..5000),
            prop::option::of(1usize..6),
            1usize..200,
            0usize..ARCHS.len(),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn own_plans_pass_and_damaged_ones_do_not(
        (lens, queries, window, max_partitions, budget, name) in batches(),
        pick in any::<prop::sample::Index>(),
        field in 0usize..6,
        value in prop_oneof![-3..100, any::<i32>()],
    ) {
        let request = PlanRequest { window, max_partitions, ..PlanRequest { query_lens: &queries, ..budgeted(&lens, budget) } };
        let arch = arch(ARCHS[name]);
        let plan = HostPlan::new(&request, &arch).unwrap();
        prop_assert!(plan.check_covers(&request, &arch).is_ok());
        prop_assert!(covers_by_counting(&plan, &request, &arch));
        prop_assert!(HostPlan::free(&request, &arch).check_covers(&request, &arch).is_ok());

        let mut damaged = plan.clone();
        let row_count = plan.reduce.len();
        // The first slot of an empty row, and a padding record's fields but the row, say nothing.
        let telling = match field {
            0..4 => {
                let record = &mut damaged.work[pick.index(plan.work.len())];
                let telling = record[0] != -1 || field == 0;
                record[field] = value;
                telling
            }
            _ => {
                let record = &mut damaged.reduce[pick.index(row_count)];
                let telling = record[1] > 0 || field == 5;
                record[field - 4] = value;
                telling
            }
        };
        if damaged != plan && telling {
            prop_assert!(damaged.check_covers(&request, &arch).is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn other_lengths_are_refused_where_tiles_differ(
        (lens, queries, window, _, budget, name) in batches(),
        row in any::<prop::sample::Index>(),
        len in -1..20_000,
    ) {
        let request = PlanRequest { window, query_lens: &queries, ..budgeted(&lens, budget) };
        let arch = arch(ARCHS[name]);
        let plan = HostPlan::new(&request, &arch).unwrap();
        let mut others = lens.clone();
        others[row.index(lens.len())] = len;
        let other = PlanRequest { context_lens: &others, ..request.clone() };
        let same = request.tile_ranges(&arch).eq(other.tile_ranges(&arch));
        prop_assert_eq!(plan.check_covers(&other, &arch).is_ok(), same);
    }

    #[test]
    fn any_records_are_judged_without_a_panic(
        work in prop::collection::vec(prop::array::uniform4(prop_oneof![-1..4, any::<i32>()]), 0..6),
        reduce in prop::collection::vec(prop::array::uniform2(prop_oneof![-1..4, any::<i32>()]), 0..4),
        lens in prop::collection::vec(prop_oneof![-1..600, any::<i32>()], 0..4),
    ) {
        let (request, arch) = (PlanRequest::new(&lens, &[1], 1), arch(ArchName::Gfx950));
        let plan = HostPlan { work, reduce };
        if plan.check_covers(&request, &arch).is_ok() {
            prop_assert!(covers_by_counting(&plan, &request, &arch));
        }
    }

    #[test]
    fn small_records_pass_only_if_they_cover(
        work in prop::collection::vec(prop::array::uniform4(-1..2), 1..3),
        reduce in prop::collection::vec(prop::array::uniform2(0..2), 1..3),
        tiles in prop::collection::vec(0..2, 1..3),
    ) {
        let lens = tokens(&tiles);
        let (request, arch) = (PlanRequest::new(&lens, &[1], 1), arch(ArchName::Gfx950));
        let plan = HostPlan { work, reduce };
        if plan.check_covers(&request, &arch).is_ok() {
            prop_assert!(covers_by_counting(&plan, &request, &arch), "{:?}", plan);
        }
    }
}

#[test]
fn tensors_hold_the_records() {
    let lens = [1000, 0, 30_000];
    let request = budgeted(&lens, 9);
    let arch = arch(ArchName::Gfx950);
    let plan = DecodePlan::new(&request, &arch, &Device::Cpu).unwrap();
    let host = HostPlan::new(&request, &arch).unwrap();
    assert_eq!((plan.work_info().dtype(), plan.work_info().dims()), (DType::I32, &[9, 4][..]));
    assert_eq!((plan.reduce_info().dtype(), plan.reduce_info().dims()), (DType::I32, &[3, 2][..]));
    assert_eq!((plan.capacity(), plan.rows()), (9, 3));
    assert_eq!(*plan.host().unwrap(), host);
    let records: Vec<Vec<i32>> = host.work.iter().map(|record| record.to_vec()).collect();
    assert_eq!(plan.work_info().to_vec2::<i32>().unwrap(), records);

    // Read back, from strided tensors too.
    let read = DecodePlan::from_tensors(plan.work_info().clone(), plan.reduce_info().clone()).unwrap();
    assert_eq!(*read.host().unwrap(), host);
    let columns = Tensor::from_vec(host.reduce.as_flattened().iter().copied().chain([7; 6]).collect(), (6, 2), &Device::Cpu).unwrap();
    let strided = columns.narrow(0, 0, 3).unwrap().t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!strided.is_contiguous());
    assert_eq!(*DecodePlan::from_tensors(plan.work_info().clone(), strided).unwrap().host().unwrap(), host);

    for (work, reduce, word) in [
        (Tensor::zeros((9, 3), DType::I32, &Device::Cpu), Tensor::zeros((3, 2), DType::I32, &Device::Cpu), "work_info"),
        (Tensor::zeros((9, 4), DType::U32, &Device::Cpu), Tensor::zeros((3, 2), DType::I32, &Device::Cpu), "work_info"),
        (Tensor::zeros((9, 4), DType::I32, &Device::Cpu), Tensor::zeros(6, DType::I32, &Device::Cpu), "reduce_info"),
    ] {
        let error = DecodePlan::from_tensors(work.unwrap(), reduce.unwrap()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }

    let empty = DecodePlan::new(&PlanRequest::new(&[], &[1], 1), &arch, &Device::Cpu).unwrap();
    assert_eq!((empty.work_info().dims(), empty.reduce_info().dims()), (&[0, 4][..], &[0, 2][..]));
    assert_eq!(DecodePlan::from_tensors(empty.work_info().clone(), empty.reduce_info().clone()).unwrap().host().unwrap().reduce.len(), 0);
}

#[test]
fn refreshed_plans_keep_their_shapes() {
    let arch = arch(ArchName::Gfx950);
    fn verify(lens: &[i32]) -> PlanRequest<'_> {
        PlanRequest::new(lens, &[4], 1)
    }
    let mut plan = DecodePlan::new(&verify(&[0; 5]), &arch, &Device::Cpu).unwrap();
    let dims = (plan.work_info().dims().to_vec(), plan.reduce_info().dims().to_vec());
    let mut rng = StdRng::seed_from_u64(8);
    for _ in 0..20 {
        let lens: Vec<i32> = (0..5).map(|_| rng.random_range(-1..400_000)).collect();
        plan = plan.refreshed(&verify(&lens), &arch).unwrap();
        assert_eq!((plan.work_info().dims().to_vec(), plan.reduce_info().dims().to_vec()), dims);
        assert_eq!(*plan.host().unwrap(), HostPlan::new(&verify(&lens), &arch).unwrap());
    }
    let error = plan.refreshed(&verify(&[9; 6]), &arch).unwrap_err().to_string();
    assert!(error.contains("5 rows") && error.contains("6 rows"), "{error}");
    let error = plan.refreshed(&PlanRequest::new(&[9; 5], &[1], 1), &arch).unwrap_err().to_string();
    assert!(error.contains("256 slots") && error.contains("512 slots"), "{error}");
}

/// `cargo test --release --test plan -- --ignored --nocapture` prints the time of one plan of 256 sequences.
#[test]
#[ignore = "a measurement, not a test"]
fn time_of_a_plan_of_256_sequences() {
    let mut rng = StdRng::seed_from_u64(7);
    let random: Vec<i32> = (0..256).map(|_| rng.random_range(1024..32_768)).collect();
    let longest: Vec<i32> = (0..256).map(|_| rng.random_range(1..=i32::MAX)).collect();
    for (name, lens, budget) in [
        ("1K-32K", &random, 512),
        ("1K-32K", &random, 300),
        ("any int32", &longest, 512),
        ("any int32", &longest, 257),
        ("any int32", &longest, 4096),
    ] {
        let request = budgeted(lens, budget);
        let mut times: Vec<f64> = (0..2000)
            .map(|_| {
                let start = Instant::now();
                std::hint::black_box(HostPlan::new(std::hint::black_box(&request), &arch(ArchName::Gfx950)).unwrap());
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("256 sequences of {name} in {budget} slots: median {:.1} us, least {:.1} us", times[1000], times[0]);
    }
}
