// Root of the planner. PA_KERNEL: its name; PA_BUCKET: rows it has room for; PA_TILE: tokens of a tile; PA_MIN_MAX; PA_RAGGED;
// PA_LONGEST_FIRST, the order of NVIDIA's plans, which the simulator runs too.
#include "../common/planner.h"

#ifndef PA_LONGEST_FIRST
#define PA_LONGEST_FIRST false
#endif

PA_ENTRY(pa::PLANNER_THREADS) PA_KERNEL(pa::PlanArgs args) { pa::plan<PA_BUCKET, PA_TILE, PA_MIN_MAX, PA_RAGGED, PA_LONGEST_FIRST>(args); }
