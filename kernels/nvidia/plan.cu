// The planner, one block of 256 threads, specialized by macros: PA_KERNEL, the entry's name; PA_BUCKET, rows it has room for; PA_TILE, tokens of a
// tile; PA_MIN_MAX; PA_RAGGED.
#include "../common/planner.h"

PA_ENTRY(pa::PLANNER_THREADS) PA_KERNEL(pa::PlanArgs args) { pa::plan<PA_BUCKET, PA_TILE, PA_MIN_MAX, PA_RAGGED, true>(args); }
