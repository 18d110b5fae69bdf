//! What every exported function does around its own work.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Code, Result};
use crate::inject;
use crate::runtime::{Runtime, runtime};

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(Code::SUCCESS) };
}

/// The thread's last error; `take` forgets it.
pub fn last_error(take: bool) -> Code {
    let last = LAST.get();
    if take {
        LAST.set(Code::SUCCESS);
    }
    match runtime().current().map(|device| device.check()) {
        Ok(Err(lost)) => lost,
        _ => last,
    }
}

/// A call that a lost device refuses.
pub fn call(name: &'static str, work: impl FnOnce(&Runtime) -> Result) -> Code {
    finish(name, |runtime| {
        runtime.current()?.check()?;
        work(runtime)
    })
}

/// A call that asks for nothing of a device.
pub fn query(name: &'static str, work: impl FnOnce(&Runtime) -> Result) -> Code {
    finish(name, work)
}

/// A call that gives something back. That is done whatever it returns, so that what is alive after a failure is what the caller forgot.
pub fn release(name: &'static str, work: impl FnOnce(&Runtime) -> Result) -> Code {
    let injected = inject::count(name);
    outcome(move |runtime| {
        let lost = runtime.current()?.check();
        work(runtime)?;
        lost?;
        injected.map_or(Ok(()), |code| Err(note(runtime, code)))
    })
}

fn finish(name: &'static str, work: impl FnOnce(&Runtime) -> Result) -> Code {
    let injected = inject::count(name);
    outcome(move |runtime| injected.map_or_else(|| work(runtime), |code| Err(note(runtime, code))))
}

fn note(runtime: &Runtime, code: Code) -> Code {
    runtime.current().map_or(code, |device| device.note(code))
}

/// Runs the call; a panic must not reach the caller, who may not be Rust.
fn outcome(work: impl FnOnce(&Runtime) -> Result) -> Code {
    let code = match catch_unwind(AssertUnwindSafe(|| work(&runtime()))) {
        Ok(Ok(())) => Code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => Code::UNKNOWN,
    };
    if code != Code::SUCCESS && code != Code::NOT_READY {
        LAST.set(code);
    }
    code
}

/// Writes a result through the caller's pointer.
///
/// # Safety
/// `out` must be null or valid for a write.
pub unsafe fn put<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// Refuses a null pointer before anything is done.
pub fn wanted<T>(out: *const T) -> Result {
    if out.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
}
