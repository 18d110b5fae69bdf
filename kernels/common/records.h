// Task records: what the planner writes and the tile and the reducer read. Shared by every GPU backend; no system headers.
#pragma once

namespace pa {

// A slot of `work_info`, I32 [capacity, 4]: tiles `first_tile..end_tile` of a plan row. A padding slot has row -1.
struct WorkInfo {
    int row, first_tile, end_tile, partition;
};

// A row of `reduce_info`, I32 [rows, 2]: its tasks fill slots `first_slot..first_slot + count`. A row without a task has count 0.
struct ReduceInfo {
    int first_slot, count;
};

}  // namespace pa
