// What a task leaves: a partial result for the reducer, or finished rows.
#pragma once

#include "softmax.h"

namespace pa {

// Four consecutive elements of the output's dtype.
template <class T>
PA_DEVICE void store_output(void *row, long element, f32x4 x) {
    if constexpr (T::QUERY == Query::F32) {
        store(row, element * 4, x);
    } else {
        constexpr Element E = T::QUERY == Query::BF16 ? Element::BF16 : Element::F16;
        store(row, element * 2, u32x2{narrow<E>(x.x, x.y), narrow<E>(x.z, x.w)});
    }
}

// Sums over all tokens of each row, of this lane's row of every M-tile.
template <class T>
PA_DEVICE void total_sums(RowStates<T> &rows, const Lds<T> &lds) {
    PA_UNROLL for (int first = 0; first < T::M_TILES; first += T::P_SLOTS) {
        const int end = first + T::P_SLOTS;
        if (first > 0) barrier();
        PA_UNROLL for (int m = first; m < end; m++) {
            const float x = sum_of_row(rows.sum[m]);
            if (lane() < 16) lds.sum(m, lane(), lds.wave) = x;
        }
        barrier();
        PA_UNROLL for (int m = first; m < end; m++) rows.sum[m] = sum(lds.sums(m, lane() % 16)) * (1.f / (1 << T::P_EXPONENT));
    }
}

// Group 1's results become part of group 0's, which alone goes on. One that has attended nothing adds nothing.
template <class T>
PA_DEVICE void merge_groups(RowStates<T> &rows, Output<T> &output, const Lds<T> &lds) {
    barrier();
    if (T::group() > 0) {
        PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) lds.merged_output(i) = output.of[i];
        if (thread() < 16) lds.merged_statistic(thread()) = {rows.maximum[0], rows.sum[0]};
    }
    barrier();
    if (T::group() > 0) return;
    const f32x2 other = lds.merged_statistic(lane() % 16);
    const float maximum = max(rows.maximum[0], other.x);
    const float reference = maximum == -INFINITE ? 0 : maximum;
    const float mine = exp2(rows.maximum[0] - reference), theirs = exp2(other.x - reference);
    rows.maximum[0] = maximum;
    rows.sum[0] = rows.sum[0] * mine + other.y * theirs;
    PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) output.of[i] = output.of[i] * mine + lds.merged_output(i) * theirs;
}

template <class T>
PA_DEVICE void store_partial(const Call &call, const Task<T> &task, const RowStates<T> &rows, const Output<T> *output) {
    const TileArgs &args = call.args;
    const long part = T::PER_HEAD ? task.slot : long(task.slot) * args.kv_heads + task.rows.head;
    PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
        const int row = m * 16 + lane() % 16;
        if (!task.rows.has(row)) continue;
        const long at = part * args.rows + task.rows.first + row;
        const long dims = at * T::HEAD_DIM + wave() * T::WAVE_DIMS + lane() / 16 * 4;
        PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) store(args.out, (dims + i * 16) * 4, output[m].of[i]);
        if (thread() < 16) store(call.statistics, at * 8, f32x2{rows.maximum[m], rows.sum[m]});
    }
}

template <class T>
PA_DEVICE void store_lse(const Call &call, const RowGroup<T> &group, int row, float lse) {
    const long q_heads = long(call.args.kv_heads) * T::GROUP;
    if (call.args.lse) store(call.args.lse, group.offset(row, q_heads, 1) * 4, lse);
}

template <class T>
PA_DEVICE void store_rows(const Call &call, const RowGroup<T> &group, const RowStates<T> &rows, const Output<T> *output) {
    PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
        const int row = m * 16 + lane() % 16;
        if (!group.has(row)) continue;
        const float sum = rows.sum[m];
        const float inverse = sum == 0 ? 0 : reciprocal(sum);
        const long element = group.offset(row, call.args.out_row, call.args.out_head) + wave() * T::WAVE_DIMS + lane() / 16 * 4;
        PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) store_output<T>(call.args.out, element + i * 16, output[m].of[i] * inverse);
        if (thread() < 16) store_lse(call, group, row, sum == 0 ? -INFINITE : (rows.maximum[m] + log2(sum)) * 0.6931471805599453f);
    }
}

// Rows that attend nothing, 16 lanes a row.
template <class T>
PA_DEVICE void store_zeros(const Call &call, const RowGroup<T> &group) {
    for (int row = thread() / 16; row < T::ROWS && group.has(row); row += 16) {
        const long element = group.offset(row, call.args.out_row, call.args.out_head) + thread() % 16 * 4;
        PA_UNROLL for (int i = 0; i < T::HEAD_DIM / 64; i++) store_output<T>(call.args.out, element + i * 64, f32x4(0));
        if (thread() % 16 == 0) store_lse(call, group, row, -INFINITE);
    }
}

}  // namespace pa
