//! Failures on demand.
//!
//! `HIP_SIM_FAIL` holds failures of the whole process, `call:nth` or `call:nth:code`, separated by commas; `any` stands for every call. Those that
//! tests ask for through the control functions count and fail the calls of the asking thread alone.

use std::cell::RefCell;
use std::sync::{LazyLock, Mutex};

use crate::error::Code;
use crate::handles::lock;

/// A failure to come.
#[derive(Debug, Clone)]
struct Planned {
    /// The function; empty for any.
    call: String,
    /// Calls until it fails, that one included.
    remaining: u64,
    /// What it returns; success stands for what the function is likeliest to return.
    code: Code,
}

#[derive(Default)]
struct Plan {
    planned: Vec<Planned>,
    failed: Vec<String>,
}

impl Plan {
    /// Counts a call and says whether it fails.
    fn count(&mut self, call: &str) -> Option<Code> {
        let mut code = None;
        self.planned.retain_mut(|planned| {
            if !planned.call.is_empty() && planned.call != call {
                return true;
            }
            planned.remaining -= 1;
            if planned.remaining == 0 && code.is_none() {
                code = Some(if planned.code == Code::SUCCESS { likely(call) } else { planned.code });
            }
            planned.remaining > 0
        });
        if code.is_some() {
            self.failed.push(call.to_string());
        }
        code
    }
}

/// What a function usually fails with.
fn likely(call: &str) -> Code {
    if call.contains("Malloc") { Code::OUT_OF_MEMORY } else { Code::UNKNOWN }
}

thread_local! {
    static OF_THREAD: RefCell<Plan> = RefCell::default();
}

static OF_PROCESS: LazyLock<Mutex<Plan>> = LazyLock::new(|| Mutex::new(parse(&std::env::var("HIP_SIM_FAIL").unwrap_or_default())));

fn parse(text: &str) -> Plan {
    let planned = text.split(',').filter(|part| !part.is_empty()).filter_map(|part| {
        let mut fields = part.split(':');
        let call = fields.next().filter(|&call| call != "any").unwrap_or_default().to_string();
        let remaining = fields.next().and_then(|nth| nth.parse().ok()).filter(|&nth| nth > 0);
        let code = Code(fields.next().and_then(|code| code.parse().ok()).unwrap_or(0));
        if remaining.is_none() {
            eprintln!("hip-sim: HIP_SIM_FAIL: `{part}` is not call:nth[:code]");
        }
        Some(Planned { call, remaining: remaining?, code })
    });
    Plan { planned: planned.collect(), failed: Vec::new() }
}

/// Lets the `nth` following call of `call` (any where empty) by this thread fail with `code`.
pub fn plan(call: &str, nth: u64, code: Code) {
    if nth > 0 {
        OF_THREAD.with_borrow_mut(|plan| plan.planned.push(Planned { call: call.to_string(), remaining: nth, code }));
    }
}

/// Forgets this thread's failures, come and to come.
pub fn clear() {
    OF_THREAD.with_borrow_mut(|plan| *plan = Plan::default());
}

/// Functions that failed on demand in this thread.
pub fn failed() -> Vec<String> {
    OF_THREAD.with_borrow(|plan| plan.failed.clone())
}

/// Counts a call and says whether it fails.
pub fn count(call: &str) -> Option<Code> {
    let thread = OF_THREAD.try_with(|plan| plan.borrow_mut().count(call)).ok().flatten();
    let process = lock(&OF_PROCESS).count(call);
    thread.or(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environments_failures_come_in_turn() {
        let mut plan = parse("hipMalloc:2,any:5:719,hipFree:nonsense,,hipMemcpyAsync:1");
        let outcomes = ["hipMalloc", "hipMalloc", "hipFree", "hipMemcpyAsync", "hipFree", "hipMalloc"].map(|call| plan.count(call));
        assert_eq!(outcomes, [None, Some(Code::OUT_OF_MEMORY), None, Some(Code::UNKNOWN), Some(Code::LAUNCH_FAILURE), None]);
        assert_eq!(plan.failed, ["hipMalloc", "hipMemcpyAsync", "hipFree"]);
    }
}
