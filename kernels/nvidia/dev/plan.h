// The min-max plan, as the crate's planner makes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../common/records.h"

namespace dev {

struct Plan {
    std::vector<pa::WorkInfo> work;
    std::vector<pa::ReduceInfo> reduce;
};

inline Plan plan(const std::vector<int>& contexts, const std::vector<int>& query_lens, int window, int tile, int capacity, int max_partitions) {
    const int rows = int(contexts.size());
    std::vector<std::pair<int, int>> ranges;
    int64_t total = 0, nonempty = 0;
    for (int row = 0; row < rows; row++) {
        const int c = contexts[row], first = window > 0 ? std::max(c - query_lens[row] - window + 1, 0) / tile : 0;
        ranges.push_back(c > 0 ? std::make_pair(first, (c + tile - 1) / tile) : std::make_pair(0, 0));
        total += ranges.back().second - ranges.back().first, nonempty += c > 0;
    }
    auto tasks = [&](int t, int64_t bound) { return int(std::min<int64_t>((t + bound - 1) / bound, max_partitions)); };
    int64_t bound = INT32_MAX;
    if (nonempty > 0 && capacity > nonempty) {
        for (bound = std::max<int64_t>((total + capacity - 1) / capacity, 1);; bound++) {
            int64_t sum = 0;
            for (auto r : ranges) sum += tasks(r.second - r.first, bound);
            if (sum <= capacity) break;
        }
    }
    Plan plan;
    // The longest tasks first.
    std::vector<int> order(rows);
    for (int row = 0; row < rows; row++) order[row] = row;
    auto longest = [&](int row) {
        const int tiles = ranges[row].second - ranges[row].first;
        return tiles ? (tiles + tasks(tiles, bound) - 1) / tasks(tiles, bound) : 0;
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return longest(a) > longest(b); });
    plan.reduce.resize(rows);
    for (int row : order) {
        const int64_t tiles = ranges[row].second - ranges[row].first, count = tasks(int(tiles), bound);
        plan.reduce[row] = {int(plan.work.size()), int(count)};
        for (int64_t i = 0; i < count; i++) {
            plan.work.push_back({row, int(ranges[row].first + i * tiles / count), int(ranges[row].first + (i + 1) * tiles / count), int(i)});
        }
    }
    while (int(plan.work.size()) < std::max(capacity, rows)) plan.work.push_back({-1, 0, 0, 0});
    return plan;
}

}  // namespace dev
