//! Device properties and attributes.

use std::ffi::{c_char, c_int, c_uint};

use cdna_sim::Arch;

use crate::config::Config;
use crate::error::{Code, Result};

/// `hipDeviceProp_tR0600`: what `hipGetDevicePropertiesR0600` of ROCm 6 and later fills in. Field order and types are the header's.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct DeviceProp {
    pub name: [c_char; 256],
    pub uuid: [c_char; 16],
    pub luid: [c_char; 8],
    pub luid_device_node_mask: c_uint,
    pub total_global_mem: usize,
    pub shared_mem_per_block: usize,
    pub regs_per_block: c_int,
    pub warp_size: c_int,
    pub mem_pitch: usize,
    pub max_threads_per_block: c_int,
    pub max_threads_dim: [c_int; 3],
    pub max_grid_size: [c_int; 3],
    pub clock_rate: c_int,
    pub total_const_mem: usize,
    pub major: c_int,
    pub minor: c_int,
    pub texture_alignment: usize,
    pub texture_pitch_alignment: usize,
    pub device_overlap: c_int,
    pub multi_processor_count: c_int,
    pub kernel_exec_timeout_enabled: c_int,
    pub integrated: c_int,
    pub can_map_host_memory: c_int,
    pub compute_mode: c_int,
    /// `maxTexture1D` to `maxSurfaceCubemapLayered`.
    pub textures: [c_int; 40],
    pub surface_alignment: usize,
    pub concurrent_kernels: c_int,
    pub ecc_enabled: c_int,
    pub pci_bus_id: c_int,
    pub pci_device_id: c_int,
    pub pci_domain_id: c_int,
    pub tcc_driver: c_int,
    pub async_engine_count: c_int,
    pub unified_addressing: c_int,
    pub memory_clock_rate: c_int,
    pub memory_bus_width: c_int,
    pub l2_cache_size: c_int,
    pub persisting_l2_cache_max_size: c_int,
    pub max_threads_per_multi_processor: c_int,
    pub stream_priorities_supported: c_int,
    pub global_l1_cache_supported: c_int,
    pub local_l1_cache_supported: c_int,
    pub shared_mem_per_multiprocessor: usize,
    pub regs_per_multiprocessor: c_int,
    pub managed_memory: c_int,
    pub is_multi_gpu_board: c_int,
    pub multi_gpu_board_group_id: c_int,
    pub host_native_atomic_supported: c_int,
    pub single_to_double_precision_perf_ratio: c_int,
    pub pageable_memory_access: c_int,
    pub concurrent_managed_access: c_int,
    pub compute_preemption_supported: c_int,
    pub can_use_host_pointer_for_registered_mem: c_int,
    pub cooperative_launch: c_int,
    pub cooperative_multi_device_launch: c_int,
    pub shared_mem_per_block_optin: usize,
    pub pageable_memory_access_uses_host_page_tables: c_int,
    pub direct_managed_mem_access_from_host: c_int,
    pub max_blocks_per_multi_processor: c_int,
    pub access_policy_max_window_size: c_int,
    pub reserved_shared_mem_per_block: usize,
    pub host_register_supported: c_int,
    pub sparse_hip_array_supported: c_int,
    pub host_register_read_only_supported: c_int,
    pub timeline_semaphore_interop_supported: c_int,
    pub memory_pools_supported: c_int,
    pub gpu_direct_rdma_supported: c_int,
    pub gpu_direct_rdma_flush_writes_options: c_uint,
    pub gpu_direct_rdma_writes_ordering: c_int,
    pub memory_pool_supported_handle_types: c_uint,
    pub deferred_mapping_hip_array_supported: c_int,
    pub ipc_event_supported: c_int,
    pub cluster_launch: c_int,
    pub unified_function_pointers: c_int,
    pub reserved: [c_int; 63],
    pub hip_reserved: [c_int; 32],
    pub gcn_arch_name: [c_char; 256],
    pub max_shared_memory_per_multi_processor: usize,
    pub clock_instruction_rate: c_int,
    pub arch: c_uint,
    pub hdp_mem_flush_cntl: usize,
    pub hdp_reg_flush_cntl: usize,
    pub cooperative_multi_device_unmatched: [c_int; 4],
    pub is_large_bar: c_int,
    pub asic_revision: c_int,
}

/// Vector registers, 32 bits each, of a compute unit: four SIMDs with 512 registers of 64 lanes.
const REGISTERS: c_int = 4 * 512 * 64;

/// Waves of a compute unit: eight on each of its four SIMDs.
const THREADS_PER_UNIT: c_int = 4 * 8 * 64;

/// A device's numbers, from which properties and attributes are both made.
struct Numbers {
    lds: usize,
    clock_khz: c_int,
    memory_clock_khz: c_int,
    l2_bytes: c_int,
}

fn numbers(arch: Arch) -> Numbers {
    let lds = arch.lds_bytes();
    match arch {
        Arch::Gfx942 => Numbers { lds, clock_khz: 2_100_000, memory_clock_khz: 1_300_000, l2_bytes: 4 << 20 },
        Arch::Gfx950 => Numbers { lds, clock_khz: 2_400_000, memory_clock_khz: 2_000_000, l2_bytes: 4 << 20 },
    }
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    chars.iter_mut().take(N - 1).zip(text.bytes()).for_each(|(c, byte)| *c = byte as c_char);
    chars
}

/// The properties of device `ordinal`.
pub fn properties(config: &Config, ordinal: usize) -> DeviceProp {
    let n = numbers(config.arch);
    // SAFETY: integers and arrays of integers: all zeros is a value.
    let mut p: DeviceProp = unsafe { std::mem::zeroed() };
    p.name = chars(config.product());
    p.uuid = chars(&format!("GPU-sim-{ordinal:02}"));
    p.total_global_mem = config.memory;
    p.shared_mem_per_block = n.lds;
    p.shared_mem_per_multiprocessor = n.lds;
    p.shared_mem_per_block_optin = n.lds;
    p.max_shared_memory_per_multi_processor = n.lds;
    p.regs_per_block = REGISTERS;
    p.regs_per_multiprocessor = REGISTERS;
    p.warp_size = 64;
    p.mem_pitch = i32::MAX as usize;
    p.max_threads_per_block = 1024;
    p.max_threads_dim = [1024; 3];
    p.max_grid_size = [i32::MAX, 65536, 65536];
    p.clock_rate = n.clock_khz;
    p.total_const_mem = i32::MAX as usize;
    (p.major, p.minor) = (9, version(config.arch));
    p.texture_alignment = 256;
    p.texture_pitch_alignment = 256;
    p.device_overlap = 1;
    p.multi_processor_count = config.compute_units;
    p.can_map_host_memory = 1;
    p.surface_alignment = 256;
    p.concurrent_kernels = 1;
    p.ecc_enabled = 1;
    p.pci_bus_id = ordinal as c_int + 1;
    p.async_engine_count = 8;
    p.unified_addressing = 1;
    p.memory_clock_rate = n.memory_clock_khz;
    p.memory_bus_width = 8192;
    p.l2_cache_size = n.l2_bytes;
    p.max_threads_per_multi_processor = THREADS_PER_UNIT;
    p.stream_priorities_supported = 1;
    p.managed_memory = 0;
    p.can_use_host_pointer_for_registered_mem = 1;
    p.max_blocks_per_multi_processor = 32;
    p.memory_pools_supported = 1;
    p.gcn_arch_name = chars(&config.arch_name());
    p.clock_instruction_rate = 100_000;
    // Every feature flag but surfaces and dynamic parallelism.
    p.arch = 0x1_ffff & !(1 << 14 | 1 << 16);
    p.is_large_bar = 1;
    p
}

fn version(arch: Arch) -> c_int {
    match arch {
        Arch::Gfx942 => 4,
        Arch::Gfx950 => 5,
    }
}

/// The attribute numbered `attribute` (`hipDeviceAttribute_t` of ROCm 6) of device `ordinal`.
pub fn attribute(config: &Config, ordinal: usize, attribute: u32) -> Result<c_int> {
    let p = properties(config, ordinal);
    let clamped = |bytes: usize| c_int::try_from(bytes).unwrap_or(c_int::MAX);
    Ok(match attribute {
        0 => p.ecc_enabled,
        2 => p.async_engine_count,
        3 => p.can_map_host_memory,
        4 => p.can_use_host_pointer_for_registered_mem,
        5 => p.clock_rate,
        6 => p.compute_mode,
        7 | 9 | 10 | 11 | 13..=18 | 20 | 24 => 0,
        8 => p.concurrent_kernels,
        12 => p.device_overlap,
        19 => p.l2_cache_size,
        23 => p.major,
        25 => p.max_blocks_per_multi_processor,
        26..=28 => p.max_threads_dim[attribute as usize - 26],
        29..=31 => p.max_grid_size[attribute as usize - 29],
        32..=54 => 0,
        55 => p.max_threads_dim[0],
        56 => p.max_threads_per_block,
        57 => p.max_threads_per_multi_processor,
        58 => clamped(p.mem_pitch),
        59 => p.memory_bus_width,
        60 => p.memory_clock_rate,
        61 => p.minor,
        62 | 65 | 66 | 70 | 73 | 77 | 80 => 0,
        63 => p.multi_processor_count,
        67 => p.pci_bus_id,
        68 => p.pci_device_id,
        69 => p.pci_domain_id,
        71 | 72 => p.regs_per_block,
        74..=76 => clamped(p.shared_mem_per_block),
        78 => p.stream_priorities_supported,
        79 | 81 | 82 => 256,
        83 => clamped(p.total_const_mem),
        84 => clamped(p.total_global_mem),
        85 => p.unified_addressing,
        87 => p.warp_size,
        88 => p.memory_pools_supported,
        89..=91 => 0,
        10000 => p.clock_instruction_rate,
        10002 => clamped(p.max_shared_memory_per_multi_processor),
        10007..=10010 => 0,
        10011 => p.is_large_bar,
        10012 => p.asic_revision,
        10013 | 10014 => 0,
        10015 => p.multi_processor_count,
        10016 => 1,
        10017 => p.clock_instruction_rate,
        10018 => 8,
        _ => return Err(Code::INVALID_VALUE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets that a C compiler gives the header's struct on x86-64.
    #[test]
    fn the_layout_is_the_headers() {
        use std::mem::{offset_of, size_of};
        assert_eq!(offset_of!(DeviceProp, total_global_mem), 288);
        assert_eq!(offset_of!(DeviceProp, warp_size), 308);
        assert_eq!(offset_of!(DeviceProp, total_const_mem), 352);
        assert_eq!(offset_of!(DeviceProp, multi_processor_count), 388);
        assert_eq!(offset_of!(DeviceProp, concurrent_kernels), 576);
        assert_eq!(offset_of!(DeviceProp, gcn_arch_name), 1160);
        assert_eq!(size_of::<DeviceProp>(), 1472);
    }
}
