//! What the attention calls took and read, and which kernels they ran.

use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use candle::cuda_backend::cudarc::driver::{CudaEvent, sys::CUevent_flags};
use candle::{Device, Result};

/// Time and KV bytes of attention calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    pub time: Duration,
    /// K and V bytes that the calls had to read, scales included, each KV head's once a sequence.
    pub kv_bytes: u64,
    pub calls: usize,
}

impl Meter {
    pub fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.kv_bytes += other.kv_bytes;
        self.calls += other.calls;
    }
}

/// Takes the time of one step's calls: on the clock of who runs them, so that what is enqueued on a GPU is not waited for.
#[derive(Default)]
pub struct Recorder {
    meter: Meter,
    /// Whether each call's kernel is asked for.
    pub explains: bool,
    /// Whether each call is made again by itself, to be compared with.
    pub repeats: bool,
    /// The kernel of each call, in order, where asked for.
    pub kernels: Vec<String>,
    /// Times of the calls by themselves.
    pub alone: Meter,
    #[cfg(feature = "cuda")]
    spans: Vec<(CudaEvent, CudaEvent)>,
}

impl Recorder {
    /// One that asks for each call's kernel, or makes each call again, where told to.
    pub fn new(explains: bool, repeats: bool) -> Self {
        Self { explains, repeats, ..Self::default() }
    }

    /// Runs `call` on `device`; it reads `kv_bytes`.
    pub fn measure<T>(&mut self, kv_bytes: u64, device: &Device, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.meter.kv_bytes += kv_bytes;
        self.meter.calls += 1;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let start = mark(device)?;
            let result = call()?;
            self.spans.push((start, mark(device)?));
            return Ok(result);
        }
        let _ = device;
        let start = Instant::now();
        let result = call()?;
        self.meter.time += start.elapsed();
        Ok(result)
    }

    /// Makes a call again, from an idle device whose caches hold other data, where that is wanted; the time is the median of a few.
    pub fn repeat<T>(&mut self, kv_bytes: u64, device: &Device, call: impl Fn() -> Result<T>) -> Result<()> {
        /// More than the last-level cache of any GPU.
        const FLUSH_BYTES: usize = 256 << 20;
        if !self.repeats {
            return Ok(());
        }
        let mut times = vec![];
        for _ in 0..5 {
            drop(candle::Tensor::zeros(FLUSH_BYTES, candle::DType::U8, device)?);
            device.synchronize()?;
            let mut one = Self::default();
            one.measure(kv_bytes, device, &call)?;
            times.push(one.finish()?.time);
        }
        times.sort_unstable();
        self.alone.add(&Meter { time: times[times.len() / 2], kv_bytes, calls: 1 });
        Ok(())
    }

    /// The times, once the calls have ended.
    pub fn finish(self) -> Result<Meter> {
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut meter = self.meter;
        #[cfg(feature = "cuda")]
        for (start, end) in &self.spans {
            let milliseconds = start.elapsed_ms(end).map_err(candle::Error::wrap)?;
            meter.time += Duration::from_secs_f32(milliseconds.max(0.0) / 1e3);
        }
        Ok(meter)
    }
}

/// The time on the device's stream.
#[cfg(feature = "cuda")]
fn mark(device: &candle::CudaDevice) -> Result<CudaEvent> {
    device.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(candle::Error::wrap)
}
