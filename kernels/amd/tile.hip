// The paged-attention decode tile for BF16, F16 and FP8 caches. What a reader follows: traits, pipeline, gemm, softmax, epilogue.
#include "pipeline.h"

extern "C" __attribute__((global, amdgpu_flat_work_group_size(pa::Traits::THREADS, pa::Traits::THREADS),
                          amdgpu_waves_per_eu(pa::Traits::WAVES_PER_EU))) void PA_KERNEL(
    const pa::WorkInfo *work, const int *block_tables, const void *q, unsigned max_pages, unsigned plan_rows, unsigned q_row, unsigned q_head,
    void *statistics, const void *key, pa::TileArgs args) {
    using T = pa::Traits;
    __attribute__((shared, aligned(16))) static pa::u8 memory[pa::Lds<T>::BYTES];
    const pa::Call call = {work, block_tables, q, max_pages, plan_rows, q_row, q_head, statistics, key, args};
    const int slot = __builtin_amdgcn_workgroup_id_x();
    if constexpr (T::DIRECT_OUTPUT) {
        const auto *reduce = (const pa::ReduceInfo *)statistics;
        const bool empty = reduce && unsigned(slot) < plan_rows && reduce[slot].count == 0;
        if (empty && T::group() == 0) pa::store_zeros(call, pa::RowGroup<T>(call, slot));
    }
    const pa::WorkInfo record = work ? work[slot] : pa::WorkInfo{slot, 0, 0, 0};
    if (record.row >= 0) pa::run_task(call, slot, record, pa::Lds<T>(memory));
}
