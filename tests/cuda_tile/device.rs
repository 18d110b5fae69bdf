//! The simulated device: its memory, and launches of compiled kernels.

use candle::{Error, Result, bail};
use candle_paged_attn::jit::Specialization;
use ptx_sim::{Early, Launch, Memory};
use testkit::arguments::Arguments;
use testkit::raw::{Raw, bytes, f32s, i32s};

use crate::compile::module;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub grid: [usize; 3],
    pub threads: usize,
    pub cluster: usize,
    pub dynamic_shared: usize,
    /// Where the kernel before may still run.
    pub early: Option<Early<'a>>,
}

impl Shape<'_> {
    /// Without clusters, with no shared memory but the kernel's own, behind a kernel that is over.
    pub fn new(grid: [usize; 3], threads: usize) -> Self {
        Self { grid, threads, cluster: 1, dynamic_shared: 0, early: None }
    }
}

#[derive(Default)]
pub struct Device(Memory);

impl Device {
    /// Where `data` is from now on; nothing is at 0.
    pub fn upload(&self, data: &[u8]) -> u64 {
        if data.is_empty() { 0 } else { self.0.upload(data).unwrap() }
    }

    pub fn ints(&self, values: &[i32]) -> u64 {
        self.upload(&bytes(values, i32::to_le_bytes))
    }

    /// Where a tensor's first element is.
    pub fn tensor(&self, raw: &Raw) -> u64 {
        self.upload(&raw.bytes) + raw.offset
    }

    /// Room for results; what no kernel writes reads as NaN, or as -1.
    pub fn unwritten(&self, bytes: usize) -> u64 {
        self.upload(&vec![0xff; bytes])
    }

    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        if bytes == 0 { vec![] } else { self.0.read(address, bytes).unwrap() }
    }

    pub fn read_f32(&self, address: u64, count: usize) -> Vec<f32> {
        f32s(&self.read(address, 4 * count))
    }

    pub fn read_i32(&self, address: u64, count: usize) -> Vec<i32> {
        i32s(&self.read(address, 4 * count))
    }

    /// Runs a kernel to its end. As on a GPU a grid with nothing in it is none.
    pub fn launch(&self, spec: &Specialization, shape: Shape<'_>, arguments: &Arguments) -> Result<()> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let module = module(spec)?;
        let Some(kernel) = module.kernel(&spec.kernel) else { bail!("{} is not in its module", spec.kernel) };
        let launch = Launch {
            grid: shape.grid.map(|blocks| blocks as u32),
            threads: shape.threads as u32,
            cluster: shape.cluster as u32,
            dynamic_shared: shape.dynamic_shared as u32,
            early: shape.early,
        };
        // A structure that pointers are in is a multiple of their size.
        let mut parameters = arguments.0.clone();
        parameters.resize(parameters.len().next_multiple_of(8), 0);
        kernel.launch(&self.0, &parameters, &launch).map_err(Error::wrap).map(drop)
    }
}
