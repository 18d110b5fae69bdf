// Root of the reducer. PA_KERNEL: its name; PA_HEAD_DIM; PA_QUERY: the output's dtype; PA_RAGGED; PA_THREADS of a block.
#include "../common/reduce.h"

PA_ENTRY(PA_THREADS) PA_KERNEL(pa::ReduceArgs args) { pa::reduce<PA_HEAD_DIM, PA_QUERY, PA_RAGGED, PA_THREADS>(args); }
