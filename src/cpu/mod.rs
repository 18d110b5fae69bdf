//! The CPU backend: flash decoding over the planner's tasks on rayon's pool.
//!
//! `schedule` turns a plan into items (a row block of queries of one KV head over a range of tokens), `task` walks an item's tokens in steps,
//! `pack` brings a step's keys and values into registers' reach, `gemm` multiplies, `softmax` weighs, `finish` merges and writes. All of it is
//! generic over an instruction set (`isa`) and an arithmetic (`math`: f32, or BF16 pairs with f32 sums; `tiles`: those in AMX tiles).

mod ahead;
mod choice;
mod decode;
mod finish;
mod gemm;
mod isa;
mod job;
mod math;
mod pack;
mod pages;
#[cfg(test)]
mod rates;
mod schedule;
mod softmax;
mod task;
#[cfg(test)]
mod tests;
#[cfg(any(test, all(target_arch = "x86_64", target_os = "linux")))]
#[cfg(any(target_arch = "x86_64", test))]
mod tiles;
mod workspace;

pub(crate) use choice::isa;
pub(crate) use isa::{available, detect};
pub(crate) use job::{Ids, Job, KvData, KvView, Output, OutputData, PageTable, QueryData, QueryView, Row, Scale};
pub(crate) use schedule::run;
pub(crate) use workspace::ROW_BLOCK;
