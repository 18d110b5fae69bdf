//! Error codes of the HIP runtime, their names and texts.

use std::ffi::CStr;

/// `hipError_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

/// What calls do here.
pub type Result<T = ()> = std::result::Result<T, Code>;

macro_rules! codes {
    ($($constant:ident = $value:literal, $name:literal, $text:literal;)*) => {
        impl Code {
            $(#[doc = $text] pub const $constant: Code = Code($value);)*

            /// The enumerator's name.
            pub fn name(self) -> &'static CStr {
                match self.0 {
                    $($value => $name,)*
                    _ => c"hipErrorUnknown",
                }
            }

            /// What it means.
            pub fn text(self) -> &'static str {
                match self.0 {
                    $($value => $text,)*
                    _ => "unknown error",
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0, c"hipSuccess", "no error";
    INVALID_VALUE = 1, c"hipErrorInvalidValue", "invalid argument";
    OUT_OF_MEMORY = 2, c"hipErrorOutOfMemory", "out of memory";
    NOT_INITIALIZED = 3, c"hipErrorNotInitialized", "initialization error";
    INVALID_CONFIGURATION = 9, c"hipErrorInvalidConfiguration", "invalid configuration argument";
    INVALID_DEVICE_POINTER = 17, c"hipErrorInvalidDevicePointer", "invalid device pointer";
    INVALID_MEMCPY_DIRECTION = 21, c"hipErrorInvalidMemcpyDirection", "invalid copy direction for memcpy";
    INVALID_DEVICE_FUNCTION = 98, c"hipErrorInvalidDeviceFunction", "invalid device function";
    NO_DEVICE = 100, c"hipErrorNoDevice", "no ROCm-capable device is detected";
    INVALID_DEVICE = 101, c"hipErrorInvalidDevice", "invalid device ordinal";
    INVALID_IMAGE = 200, c"hipErrorInvalidImage", "device kernel image is invalid";
    NO_BINARY_FOR_GPU = 209, c"hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device";
    SHARED_OBJECT_INIT_FAILED = 303, c"hipErrorSharedObjectInitFailed", "shared object initialization failed";
    INVALID_HANDLE = 400, c"hipErrorInvalidHandle", "invalid resource handle";
    ILLEGAL_STATE = 401, c"hipErrorIllegalState", "the operation cannot be performed in the present state";
    NOT_FOUND = 500, c"hipErrorNotFound", "named symbol not found";
    NOT_READY = 600, c"hipErrorNotReady", "device not ready";
    ILLEGAL_ADDRESS = 700, c"hipErrorIllegalAddress", "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, c"hipErrorLaunchOutOfResources", "too many resources requested for launch";
    LAUNCH_TIME_OUT = 702, c"hipErrorLaunchTimeOut", "the launch timed out and was terminated";
    CONTEXT_IS_DESTROYED = 709, c"hipErrorContextIsDestroyed", "context is destroyed";
    ASSERT = 710, c"hipErrorAssert", "device-side assert triggered";
    LAUNCH_FAILURE = 719, c"hipErrorLaunchFailure", "unspecified launch failure";
    NOT_SUPPORTED = 801, c"hipErrorNotSupported", "operation not supported";
    CAPTURE_UNSUPPORTED = 900, c"hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901, c"hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture";
    CAPTURE_MERGE = 902, c"hipErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences";
    CAPTURE_UNMATCHED = 903, c"hipErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began";
    CAPTURE_UNJOINED = 904, c"hipErrorStreamCaptureUnjoined", "capturing stream has unjoined work";
    CAPTURE_ISOLATION = 905, c"hipErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream";
    CAPTURE_IMPLICIT = 906, c"hipErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, c"hipErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = 908, c"hipErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, c"hipErrorUnknown", "unknown error";
}

impl Code {
    /// Whether the device is lost once it has reported this.
    pub fn is_sticky(self) -> bool {
        matches!(self, Code::ILLEGAL_ADDRESS | Code::LAUNCH_TIME_OUT | Code::ASSERT | Code::LAUNCH_FAILURE)
    }
}
