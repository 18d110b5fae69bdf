//! Random C functions, compiled by one clang for the GPU and for this machine: the simulator gives the machine's bits.

mod support;

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt::Write;

use cdna_sim::{Launch, Memory, Module};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::{ARCHS, compile, host_library};

/// Functions a source.
const FUNCTIONS: usize = 40;
/// Input rows.
const ROWS: usize = 512;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    U32,
    I32,
    U64,
    I64,
    U16,
    I16,
    U8,
    F32,
    F16,
    F64,
    F16x2,
    I16x2,
    U16x2,
    F32x2,
}

use Type::*;

impl Type {
    const ALL: [Type; 14] = [U32, I32, U64, I64, U16, I16, U8, F32, F16, F64, F16x2, I16x2, U16x2, F32x2];
    const SCALAR: [Type; 10] = [U32, I32, U64, I64, U16, I16, U8, F32, F16, F64];
    const PAIRS: [(Type, Type); 4] = [(F16x2, F16), (I16x2, I16), (U16x2, U16), (F32x2, F32)];

    fn c(self) -> &'static str {
        match self {
            U32 => "u32",
            I32 => "i32",
            U64 => "u64",
            I64 => "i64",
            U16 => "u16",
            I16 => "i16",
            U8 => "u8",
            F32 => "f32",
            F16 => "f16",
            F64 => "f64",
            F16x2 => "f16x2",
            I16x2 => "i16x2",
            U16x2 => "u16x2",
            F32x2 => "f32x2",
        }
    }

    /// What a pair is of.
    fn element(self) -> Option<Type> {
        Type::PAIRS.iter().find(|(pair, _)| *pair == self).map(|(_, element)| *element)
    }

    /// Pairs of it.
    fn pair(self) -> Option<Type> {
        Type::PAIRS.iter().find(|(_, element)| *element == self).map(|(pair, _)| *pair)
    }

    fn is_float(self) -> bool {
        matches!(self, F32 | F16 | F64)
    }
}

/// A random expression of a type, `depth` operations deep at most.
fn expression(rng: &mut StdRng, ty: Type, depth: usize) -> String {
    let name = ty.c();
    if depth == 0 || rng.random_ratio(1, 12) {
        return leaf(rng, ty);
    }
    if let Some(element) = ty.element() {
        return pair_expression(rng, ty, element, depth);
    }
    if let Some(pair) = ty.pair().filter(|_| rng.random_ratio(1, 6)) {
        return format!("{}[{}]", expression(rng, pair, depth - 1), rng.random_range(0..2));
    }
    if rng.random_ratio(1, 6) {
        let from = Type::SCALAR[rng.random_range(0..Type::SCALAR.len())];
        return format!("{}_from_{}({})", name, from.c(), expression(rng, from, depth - 1));
    }
    if rng.random_ratio(1, 8) {
        let of = Type::SCALAR[rng.random_range(0..Type::SCALAR.len())];
        let compare = ["<", "<=", "==", "!=", ">", ">="][rng.random_range(0..6)];
        let [a, b] = [(); 2].map(|()| expression(rng, of, depth - 1));
        let [x, y] = [(); 2].map(|()| expression(rng, ty, depth - 1));
        return format!("({a} {compare} {b} ? {x} : {y})");
    }
    let operations: &[(&str, usize)] = match ty {
        F32 | F64 | F16 => &[
            ("add", 2),
            ("sub", 2),
            ("mul", 2),
            ("fma", 3),
            ("min", 2),
            ("max", 2),
            ("neg", 1),
            ("abs", 1),
            ("floor", 1),
            ("ceil", 1),
            ("trunc", 1),
            ("rint", 1),
            ("div", 2),
            ("sqrt", 1),
        ],
        _ => &[
            ("add", 2),
            ("sub", 2),
            ("mul", 2),
            ("and", 2),
            ("or", 2),
            ("xor", 2),
            ("not", 1),
            ("shl", 2),
            ("shr", 2),
            ("rotl", 2),
            ("min", 2),
            ("max", 2),
            ("add_sat", 2),
            ("sub_sat", 2),
            ("div", 2),
            ("rem", 2),
            ("popcount", 1),
            ("clz", 1),
            ("ctz", 1),
            ("reverse", 1),
            ("mulhi", 2),
            ("muladd", 3),
        ],
    };
    let (operation, arity) = operations[rng.random_range(0..operations.len())];
    // Correctly rounded quotients and roots of these take instruction sequences of their own.
    if ty != F32 && ty.is_float() && matches!(operation, "div" | "sqrt") {
        return leaf(rng, ty);
    }
    let operands: Vec<String> = (0..arity).map(|_| expression(rng, ty, depth - 1)).collect();
    format!("{name}_{operation}({})", operands.join(", "))
}

/// An expression of a pair.
fn pair_expression(rng: &mut StdRng, ty: Type, element: Type, depth: usize) -> String {
    let name = ty.c();
    match rng.random_range(0..8) {
        0 => {
            let [a, b] = [(); 2].map(|()| expression(rng, element, depth - 1));
            return format!("(({name}){{ {a}, {b} }})");
        }
        1 | 2 => {
            let [a, b] = [(); 2].map(|()| expression(rng, ty, depth - 1));
            return format!("__builtin_shufflevector({a}, {b}, {}, {})", rng.random_range(0..4), rng.random_range(0..4));
        }
        _ => {}
    }
    let operations: &[(&str, usize)] = if element.is_float() {
        &[("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("neg", 1), ("abs", 1)]
    } else {
        &[
            ("add", 2),
            ("sub", 2),
            ("mul", 2),
            ("muladd", 3),
            ("and", 2),
            ("or", 2),
            ("xor", 2),
            ("not", 1),
            ("shl", 2),
            ("shr", 2),
            ("min", 2),
            ("max", 2),
            ("add_sat", 2),
            ("sub_sat", 2),
        ]
    };
    let (operation, arity) = operations[rng.random_range(0..operations.len())];
    let operands: Vec<String> = (0..arity).map(|_| expression(rng, ty, depth - 1)).collect();
    format!("{name}_{operation}({})", operands.join(", "))
}

fn leaf(rng: &mut StdRng, ty: Type) -> String {
    if ty.element().is_none() && rng.random_ratio(1, 4) {
        return match ty {
            F32 | F16 | F64 => format!("({})({:?})", ty.c(), [0.5, 1.0, -2.0, 3.25, 1e-3, 100.0][rng.random_range(0..6)]),
            _ => format!("({})({})", ty.c(), [0i64, 1, -1, 7, 31, 255, 0x1234_5678, -16][rng.random_range(0..8)]),
        };
    }
    format!("in_{}(in, {})", ty.c(), rng.random_range(0..4))
}

/// What the generated functions are made of: defined for every input, and the same on both machines. (Which zero a minimum gives is not.)
fn prelude() -> String {
    let mut text = String::from(
        "typedef unsigned u32; typedef int i32; typedef unsigned long u64; typedef long i64; typedef unsigned short u16; typedef short i16;\n\
         typedef unsigned char u8; typedef float f32; typedef _Float16 f16; typedef double f64;\n\
         #define FMA_f32 __builtin_elementwise_fma\n#define FMA_f64 __builtin_elementwise_fma\n#define FMA_f32x2 __builtin_elementwise_fma\n\
         #ifdef __HIP__\n#define FN static inline __attribute__((device, always_inline))\n\
         #define FMA_f16 __builtin_elementwise_fma\n#define FMA_f16x2 __builtin_elementwise_fma\n\
         #else\n#define FN static inline\n\
         // Single rounding, which this machine's conversions through f32 would not give.\n\
         #define FMA_f16(a, b, c) ((f16)((f64)(a) * (f64)(b) + (f64)(c)))\n\
         #define FMA_f16x2(a, b, c) ((f16x2){ FMA_f16((a)[0], (b)[0], (c)[0]), FMA_f16((a)[1], (b)[1], (c)[1]) })\n#endif\n",
    );
    for (ty, bits, signed) in [
        ("u32", 32, false),
        ("i32", 32, true),
        ("u64", 64, false),
        ("i64", 64, true),
        ("u16", 16, false),
        ("i16", 16, true),
        ("u8", 8, false),
    ] {
        let unsigned = format!("u{bits}");
        let mask = bits - 1;
        let _ = write!(
            text,
            "FN {ty} in_{ty}(const u64 *in, int i) {{ return ({ty})in[i]; }}\n\
             FN {ty} {ty}_add({ty} a, {ty} b) {{ return ({ty})(({unsigned})a + ({unsigned})b); }}\n\
             FN {ty} {ty}_sub({ty} a, {ty} b) {{ return ({ty})(({unsigned})a - ({unsigned})b); }}\n\
             FN {ty} {ty}_mul({ty} a, {ty} b) {{ return ({ty})(1u * ({unsigned})a * ({unsigned})b); }}\n\
             FN {ty} {ty}_muladd({ty} a, {ty} b, {ty} c) {{ return {ty}_add({ty}_mul(a, b), c); }}\n\
             FN {ty} {ty}_and({ty} a, {ty} b) {{ return a & b; }}\n\
             FN {ty} {ty}_or({ty} a, {ty} b) {{ return a | b; }}\n\
             FN {ty} {ty}_xor({ty} a, {ty} b) {{ return a ^ b; }}\n\
             FN {ty} {ty}_not({ty} a) {{ return ({ty})~a; }}\n\
             FN {ty} {ty}_shl({ty} a, {ty} b) {{ return ({ty})(({unsigned})a << (b & {mask})); }}\n\
             FN {ty} {ty}_shr({ty} a, {ty} b) {{ return ({ty})(a >> (b & {mask})); }}\n\
             FN {ty} {ty}_rotl({ty} a, {ty} b) {{ return ({ty})__builtin_rotateleft{bits}(({unsigned})a, ({unsigned})b); }}\n\
             FN {ty} {ty}_min({ty} a, {ty} b) {{ return __builtin_elementwise_min(a, b); }}\n\
             FN {ty} {ty}_max({ty} a, {ty} b) {{ return __builtin_elementwise_max(a, b); }}\n\
             FN {ty} {ty}_add_sat({ty} a, {ty} b) {{ return __builtin_elementwise_add_sat(a, b); }}\n\
             FN {ty} {ty}_sub_sat({ty} a, {ty} b) {{ return __builtin_elementwise_sub_sat(a, b); }}\n\
             FN {ty} {ty}_popcount({ty} a) {{ return ({ty})__builtin_popcountll(({unsigned})a); }}\n\
             FN {ty} {ty}_clz({ty} a) {{ return ({ty})(a ? __builtin_clzll((u64)({unsigned})a) : 64); }}\n\
             FN {ty} {ty}_ctz({ty} a) {{ return ({ty})(a ? __builtin_ctzll((u64)({unsigned})a) : 64); }}\n\
             FN {ty} {ty}_reverse({ty} a) {{ return ({ty})__builtin_bitreverse{bits}(({unsigned})a); }}\n"
        );
        let guard = if signed { "b == 0 || b == -1" } else { "b == 0" };
        let wide = if bits == 64 {
            if signed { "__int128" } else { "unsigned __int128" }
        } else if signed {
            "i64"
        } else {
            "u64"
        };
        let _ = write!(
            text,
            "FN {ty} {ty}_div({ty} a, {ty} b) {{ return {guard} ? a : ({ty})(a / b); }}\n\
             FN {ty} {ty}_rem({ty} a, {ty} b) {{ return {guard} ? b : ({ty})(a % b); }}\n\
             FN {ty} {ty}_mulhi({ty} a, {ty} b) {{ return ({ty})((({wide})a * b) >> {bits}); }}\n"
        );
    }
    for ty in ["f32", "f16", "f64"] {
        let (bits, nan) = match ty {
            "f32" => ("u32", "0x7fc00000u"),
            "f16" => ("u16", "0x7e00u"),
            _ => ("u64", "0x7ff8000000000000ul"),
        };
        let _ = write!(
            text,
            "FN {ty} in_{ty}(const u64 *in, int i) {{ {bits} b = ({bits})in[i]; {ty} x; __builtin_memcpy(&x, &b, sizeof x); return x; }}\n\
             FN u64 {ty}_bits({ty} x) {{ {bits} b; __builtin_memcpy(&b, &x, sizeof b); return x != x ? {nan} : b; }}\n\
             FN {ty} {ty}_add({ty} a, {ty} b) {{ return a + b; }}\n\
             FN {ty} {ty}_sub({ty} a, {ty} b) {{ return a - b; }}\n\
             FN {ty} {ty}_mul({ty} a, {ty} b) {{ return a * b; }}\n\
             FN {ty} {ty}_div({ty} a, {ty} b) {{ return a / b; }}\n\
             FN {ty} {ty}_fma({ty} a, {ty} b, {ty} c) {{ return FMA_{ty}(a, b, c); }}\n\
             FN {ty} {ty}_min({ty} a, {ty} b) {{ {ty} x = a < b ? a : b; return x == 0 ? ({ty})0 : x; }}\n\
             FN {ty} {ty}_max({ty} a, {ty} b) {{ {ty} x = a > b ? a : b; return x == 0 ? ({ty})0 : x; }}\n\
             FN {ty} {ty}_neg({ty} a) {{ return -a; }}\n\
             FN {ty} {ty}_abs({ty} a) {{ return __builtin_elementwise_abs(a); }}\n\
             FN {ty} {ty}_floor({ty} a) {{ return __builtin_elementwise_floor(a); }}\n\
             FN {ty} {ty}_ceil({ty} a) {{ return __builtin_elementwise_ceil(a); }}\n\
             FN {ty} {ty}_trunc({ty} a) {{ return __builtin_elementwise_trunc(a); }}\n\
             FN {ty} {ty}_rint({ty} a) {{ return __builtin_elementwise_roundeven(a); }}\n\
             FN {ty} {ty}_sqrt({ty} a) {{ return __builtin_elementwise_sqrt(a); }}\n"
        );
    }
    for (pair, element) in Type::PAIRS {
        let (ty, bits) = (pair.c(), if element == F32 { "u64" } else { "u32" });
        let _ = write!(
            text,
            "typedef {} {ty} __attribute__((ext_vector_type(2)));\n\
             FN {ty} in_{ty}(const u64 *in, int i) {{ {bits} b = ({bits})in[i]; {ty} x; __builtin_memcpy(&x, &b, sizeof x); return x; }}\n\
             FN {ty} {ty}_add({ty} a, {ty} b) {{ return a + b; }}\n\
             FN {ty} {ty}_sub({ty} a, {ty} b) {{ return a - b; }}\n\
             FN {ty} {ty}_mul({ty} a, {ty} b) {{ return a * b; }}\n",
            element.c()
        );
        let _ = if element.is_float() {
            write!(
                text,
                "FN u64 {ty}_bits({ty} x) {{ return {0}_bits(x[0]) ^ {0}_bits(x[1]) << 32; }}\n\
                 FN {ty} {ty}_fma({ty} a, {ty} b, {ty} c) {{ return FMA_{ty}(a, b, c); }}\n\
                 FN {ty} {ty}_neg({ty} a) {{ return -a; }}\n\
                 FN {ty} {ty}_abs({ty} a) {{ return __builtin_elementwise_abs(a); }}\n",
                element.c()
            )
        } else {
            write!(
                text,
                "FN u64 {ty}_bits({ty} x) {{ u32 b; __builtin_memcpy(&b, &x, sizeof b); return b; }}\n\
                 FN {ty} {ty}_muladd({ty} a, {ty} b, {ty} c) {{ return a * b + c; }}\n\
                 FN {ty} {ty}_and({ty} a, {ty} b) {{ return a & b; }}\n\
                 FN {ty} {ty}_or({ty} a, {ty} b) {{ return a | b; }}\n\
                 FN {ty} {ty}_xor({ty} a, {ty} b) {{ return a ^ b; }}\n\
                 FN {ty} {ty}_not({ty} a) {{ return ~a; }}\n\
                 FN {ty} {ty}_shl({ty} a, {ty} b) {{ return a << (b & ({0})15); }}\n\
                 FN {ty} {ty}_shr({ty} a, {ty} b) {{ return a >> (b & ({0})15); }}\n\
                 FN {ty} {ty}_min({ty} a, {ty} b) {{ return __builtin_elementwise_min(a, b); }}\n\
                 FN {ty} {ty}_max({ty} a, {ty} b) {{ return __builtin_elementwise_max(a, b); }}\n\
                 FN {ty} {ty}_add_sat({ty} a, {ty} b) {{ return __builtin_elementwise_add_sat(a, b); }}\n\
                 FN {ty} {ty}_sub_sat({ty} a, {ty} b) {{ return __builtin_elementwise_sub_sat(a, b); }}\n",
                element.c()
            )
        };
    }
    for to in Type::SCALAR {
        for from in Type::SCALAR {
            let limit = match to {
                U32 => "a >= 0 && a < 4294967296.0",
                I32 => "a > -2147483648.0 && a < 2147483648.0",
                U64 => "a >= 0 && a < 18446744073709551616.0",
                I64 => "a > -9223372036854775808.0 && a < 9223372036854775808.0",
                U16 => "a >= 0 && a < 65536.0",
                I16 => "a > -32768.0 && a < 32768.0",
                U8 => "a >= 0 && a < 256.0",
                _ => "1",
            };
            let limit = if from.is_float() { limit } else { "1" };
            let (to, from) = (to.c(), from.c());
            let _ = writeln!(text, "FN {to} {to}_from_{from}({from} a) {{ return {limit} ? ({to})a : ({to})3; }}");
        }
    }
    text
}

/// Functions `g0`, `g1`, ... of a row of four 64-bit inputs, their results as bits; NaNs are all the same one.
fn functions(rng: &mut StdRng) -> String {
    let mut text = prelude();
    for i in 0..FUNCTIONS {
        let ty = Type::ALL[rng.random_range(0..Type::ALL.len())];
        let depth = rng.random_range(1..6);
        let body = expression(rng, ty, depth);
        let bits = match ty {
            F32 => "f32_bits(x)",
            F16 => "f16_bits(x)",
            F64 => "f64_bits(x)",
            F16x2 | I16x2 | U16x2 | F32x2 => &format!("{}_bits(x)", ty.c()),
            _ => "(u64)x",
        };
        let _ = writeln!(text, "FN u64 g{i}(const u64 *in) {{ {} x = {body}; return {bits}; }}", ty.c());
    }
    let calls: String = (0..FUNCTIONS).map(|i| format!("    out[{i}] = g{i}(in);\n")).collect();
    let _ = write!(
        text,
        "#ifdef __HIP__\n\
         extern \"C\" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void all(const u64 *in, u64 *out) {{\n\
         u32 row = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();\n    in += 4 * row;\n    out += {FUNCTIONS} * row;\n{calls}}}\n\
         #else\nvoid all(const u64 *in, u64 *out) {{\n{calls}}}\n#endif\n"
    );
    text
}

/// A value of any bits, or one that functions trip over.
fn input(rng: &mut StdRng) -> u64 {
    match rng.random_range(0..8) {
        0 => rng.random_range(0..40),
        1 => u64::from(rng.random_range(-100.0f32..100.0).to_bits()),
        2 => rng.random_range(-100.0f64..100.0).to_bits(),
        3 => u64::from(half::f16::from_f32(rng.random_range(-60.0..60.0)).to_bits()),
        4 => [0, u64::MAX, 1 << 63, 1 << 31, 0x7f80_0000, 0x3f80_0000, 0x8000, 0x7c00, 0x7ff0_0000_0000_0000, 1, 0x7fff_ffff]
            [rng.random_range(0..11)],
        5 => (rng.random_range(-50i64..50)) as u64,
        _ => rng.random(),
    }
}

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlclose(library: *mut c_void) -> c_int;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// What this machine gives.
fn on_the_host(source: &str, rows: &[u64]) -> Vec<u64> {
    let file = CString::new(host_library(source).to_str().unwrap()).unwrap();
    let mut out = vec![0; ROWS * FUNCTIONS];
    // SAFETY: the library was just compiled: it has this function, which reads four numbers and writes as many as there are functions.
    unsafe {
        let library = dlopen(file.as_ptr(), 2);
        assert!(!library.is_null());
        let all: extern "C" fn(*const u64, *mut u64) = std::mem::transmute(dlsym(library, c"all".as_ptr()));
        for (row, out) in rows.chunks(4).zip(out.chunks_mut(FUNCTIONS)) {
            all(row.as_ptr(), out.as_mut_ptr());
        }
        dlclose(library);
    }
    std::fs::remove_file(file.to_str().unwrap()).unwrap();
    out
}

fn check(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let source = functions(&mut rng);
    let rows: Vec<u64> = (0..4 * ROWS).map(|_| input(&mut rng)).collect();
    let want = on_the_host(&source, &rows);
    for arch in ARCHS {
        for level in ["-O3", "-O1"] {
            let module = Module::load(&compile(&source, arch, &["-ffp-contract=off", "-fwrapv", level, "-Wno-everything"])).unwrap();
            let memory = Memory::new();
            let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (input, output) = (memory.upload(&bytes).unwrap(), memory.alloc(8 * want.len()).unwrap());
            let args = [input, output].map(u64::to_le_bytes).concat();
            let kernel = module.kernel("all").unwrap();
            if let Err(e) = module.launch(&memory, kernel, &args, &Launch::new([ROWS as u32 / 64, 1, 1], [64, 1, 1])) {
                panic!("seed {seed}, {arch} {level}: {e}");
            }
            let got = memory.read(output, 8 * want.len()).unwrap();
            for (at, (got, want)) in got.as_chunks::<8>().0.iter().map(|x| u64::from_le_bytes(*x)).zip(&want).enumerate() {
                let (row, function) = (at / FUNCTIONS, at % FUNCTIONS);
                let line = source.lines().find(|line| line.contains(&format!(" g{function}("))).unwrap();
                assert_eq!(got, *want, "seed {seed}, {arch} {level}: {line}\nof {:x?}: {got:x}, not {want:x}", &rows[4 * row..4 * row + 4]);
            }
        }
    }
}

#[test]
fn the_simulator_computes_what_the_host_does() {
    require_clang!();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("CDNA_SIM_SEED") {
        Some(first) => (first..first + number("CDNA_SIM_SEEDS").unwrap_or(1)).for_each(check),
        // The last once divided into the denormals with two roundings.
        None => [1, 2, 339].into_iter().for_each(check),
    }
}
