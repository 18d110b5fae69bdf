//! Modules, functions, launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cdna_sim::Launch;

use crate::error::{Code, Result};
use crate::guard::{call, put, release, wanted};
use crate::handles::Handle;
use crate::module::{Function, Module, image, load};
use crate::runtime::Runtime;
use crate::work::Work;

/// Loads a code object from memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadData(module: *mut Handle, data: *const c_void) -> Code {
    // SAFETY: the caller's pointers.
    call("hipModuleLoadData", |runtime| unsafe { load_data(runtime, module, data) })
}

/// Loads a code object from memory; options are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadDataEx(
    module: *mut Handle,
    data: *const c_void,
    _options: c_uint,
    _names: *mut c_uint,
    _values: *mut *mut c_void,
) -> Code {
    // SAFETY: the caller's pointers.
    call("hipModuleLoadDataEx", |runtime| unsafe { load_data(runtime, module, data) })
}

/// # Safety
/// `module` must be null or valid for a write, `data` null or an image.
unsafe fn load_data(runtime: &Runtime, module: *mut Handle, data: *const c_void) -> Result {
    wanted(module)?;
    let device = runtime.current()?;
    // SAFETY: the caller's promise.
    let code = load(unsafe { image(data.cast(), runtime.config.arch) }?)?;
    device.counts.modules.add(1);
    device.counts.module_loads.add(1);
    let handle = runtime.modules.insert(|_| Module { device: device.ordinal, code, loaded: AtomicBool::new(true) });
    // SAFETY: the caller's promise.
    unsafe { put(module, handle) }
}

/// Unloads a module and its functions.
#[unsafe(no_mangle)]
pub extern "C" fn hipModuleUnload(module: Handle) -> Code {
    release("hipModuleUnload", |runtime| {
        let module = runtime.modules.remove(module).ok_or(Code::INVALID_HANDLE)?;
        runtime.devices[module.device].counts.modules.add(-1);
        runtime.unload(&module);
        Ok(())
    })
}

/// A kernel of a module by name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Code {
    call("hipModuleGetFunction", |runtime| {
        wanted(function)?;
        wanted(name)?;
        // SAFETY: the caller's string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        if name.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        let module = runtime.modules.get(module).ok_or(Code::INVALID_HANDLE)?;
        let kernel = module.code.object.kernels.iter().position(|kernel| kernel.name == name).ok_or(Code::NOT_FOUND)?;
        // SAFETY: the caller's pointer.
        unsafe { put(function, runtime.functions.insert(|_| Function { module, kernel })) }
    })
}

/// An attribute of a kernel: `hipFunction_attribute`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: Handle) -> Code {
    call("hipFuncGetAttribute", |runtime| {
        wanted(value)?;
        let function = runtime.functions.get(function).ok_or(Code::INVALID_HANDLE)?;
        let info = function.info();
        let lds = runtime.config.arch.lds_bytes();
        let number = match attribute {
            0 => info.max_workgroup_size,
            1 => info.group_segment_size,
            2 => 0,
            3 => info.private_segment_size,
            4 => info.register_file().0,
            5 | 6 => 90 + if runtime.config.arch == cdna_sim::Arch::Gfx950 { 5 } else { 4 },
            7 => 0,
            8 => lds.saturating_sub(info.group_segment_size),
            9 => 0,
            _ => return Err(Code::INVALID_VALUE),
        };
        // SAFETY: the caller's pointer.
        unsafe { put(value, c_int::try_from(number).unwrap_or(c_int::MAX)) }
    })
}

/// Markers in a launch's `extra` array.
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;
const END: usize = 3;

/// The explicit arguments' bytes, from the one or the other way of passing them.
///
/// # Safety
/// The arrays must be as the HIP headers want them.
unsafe fn arguments(function: &Function, params: *mut *mut c_void, extra: *mut *mut c_void) -> Result<Vec<u8>> {
    let needed = function.explicit_bytes();
    let name = &function.info().name;
    if !params.is_null() && !extra.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    if !params.is_null() {
        let mut bytes = vec![0; needed];
        let explicit = function.info().args.iter().filter(|arg| !arg.value_kind.starts_with("hidden_"));
        for (i, arg) in explicit.enumerate() {
            // SAFETY: the caller passes a pointer to each argument.
            let from = unsafe { *params.add(i) };
            wanted(from)?;
            // SAFETY: as above; `needed` covers all arguments.
            unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), bytes[arg.offset..].as_mut_ptr(), arg.size) };
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return if needed == 0 { Ok(Vec::new()) } else { Err(Code::INVALID_VALUE) };
    }
    let (mut pointer, mut size) = (std::ptr::null::<u8>(), None);
    for i in 0.. {
        // SAFETY: the array goes on until its end marker; two entries are read where a marker says that a value follows.
        unsafe {
            match *extra.add(2 * i) as usize {
                BUFFER_POINTER => pointer = (*extra.add(2 * i + 1)).cast(),
                BUFFER_SIZE => {
                    let at = (*extra.add(2 * i + 1)).cast::<usize>();
                    wanted(at)?;
                    size = Some(*at);
                }
                END => break,
                _ => return Err(Code::INVALID_VALUE),
            }
        }
    }
    let size = size.ok_or(Code::INVALID_VALUE)?;
    if size < needed || size > function.info().kernarg_size.max(needed) {
        eprintln!("hip-sim: kernel {name} takes {needed} bytes of arguments and was given {size}");
        return Err(Code::INVALID_VALUE);
    }
    if size == 0 {
        return Ok(Vec::new());
    }
    wanted(pointer)?;
    // SAFETY: the caller's buffer has `size` bytes.
    Ok(unsafe { std::slice::from_raw_parts(pointer, size) }[..needed].to_vec())
}

/// Launches a kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    call("hipModuleLaunchKernel", |runtime| {
        let stream = runtime.stream(stream).map_err(|_| Code::INVALID_VALUE)?;
        let function = runtime.functions.get(function).ok_or(Code::INVALID_HANDLE)?;
        if function.module.device != stream.device {
            return Err(Code::INVALID_DEVICE);
        }
        let shape = Launch {
            dynamic_lds: shared as usize,
            instruction_limit: runtime.config.instruction_limit,
            ..Launch::new([grid_x, grid_y, grid_z], [block_x, block_y, block_z])
        };
        check(runtime, &function, &shape)?;
        // SAFETY: the caller's arrays.
        let args = unsafe { arguments(&function, params, extra) }?;
        let device = &runtime.devices[stream.device];
        let recorded = runtime.submit(&stream, Work::Kernel { function: Arc::clone(&function), args, launch: shape })?;
        device.counts.launches.add(i64::from(!recorded));
        Ok(())
    })
}

/// Refuses shapes that the device cannot run.
fn check(runtime: &Runtime, function: &Function, launch: &Launch) -> Result {
    let info = function.info();
    let refuse = |code: Code, reason: String| {
        eprintln!("hip-sim: launch of {}: {reason}", info.name);
        Err(code)
    };
    let [x, y, z] = launch.grid;
    if launch.block.contains(&0) {
        return refuse(Code::INVALID_CONFIGURATION, format!("block {:?}", launch.block));
    }
    if launch.grid.contains(&0) || x > i32::MAX as u32 || y > 65536 || z > 65536 {
        return refuse(Code::INVALID_VALUE, format!("grid {:?}", launch.grid));
    }
    let wide = launch.grid.iter().zip(launch.block).any(|(&grid, block)| u64::from(grid) * u64::from(block) > u32::MAX.into());
    if wide {
        return refuse(Code::INVALID_CONFIGURATION, format!("grid {:?} of blocks {:?}", launch.grid, launch.block));
    }
    let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
    if threads > 1024 {
        return refuse(Code::INVALID_VALUE, format!("block {:?}", launch.block));
    }
    if threads > info.max_workgroup_size as u64 {
        return refuse(Code::LAUNCH_FAILURE, format!("block {:?} where the kernel allows {}", launch.block, info.max_workgroup_size));
    }
    let (lds, room) = (info.group_segment_size + launch.dynamic_lds, runtime.config.arch.lds_bytes());
    if launch.dynamic_lds > room {
        return refuse(Code::INVALID_VALUE, format!("{} bytes of dynamic LDS of {room}", launch.dynamic_lds));
    }
    if lds > room {
        return refuse(Code::LAUNCH_OUT_OF_RESOURCES, format!("{lds} bytes of LDS of {room}"));
    }
    Ok(())
}
