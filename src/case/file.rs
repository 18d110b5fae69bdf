//! The case file: safetensors with the call's tensors by name and its options as metadata strings.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use candle::{DType, Device, Result, Tensor, bail};
use safetensors::tensor::{Metadata, TensorInfo};

use super::Case;
use crate::cache::{CacheLayout, KvDtype};
use crate::options::{DecodeOptions, KvScale, PlanChoice};
use crate::plan::DecodePlan;

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
const CACHES: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::U8];
const INDICES: &[DType] = &[DType::U32, DType::I32];

/// Every tensor a case file may hold, with its dtypes.
const TENSORS: &[(&str, &[DType])] = &[
    ("q", FLOATS),
    ("key_cache", CACHES),
    ("value_cache", CACHES),
    ("block_tables", INDICES),
    ("context_lens", INDICES),
    ("k_scale", &[DType::F32]),
    ("v_scale", &[DType::F32]),
    ("key_block_scale", &[DType::U8]),
    ("value_block_scale", &[DType::U8]),
    ("sinks", &[DType::F32]),
    ("query_start", INDICES),
    ("work_info", &[DType::I32]),
    ("reduce_info", &[DType::I32]),
    ("expected", FLOATS),
];

/// The metadata keys that mean something.
const KEYS: &[&str] = &["query_len", "layout", "softmax_scale", "window", "softcap", "max_partitions", "workgroup_budget", "plan"];

/// Most elements that the dims of an empty tensor may multiply to, zeros left out: no real call comes near, and sizes
/// computed from the dims cannot overflow.
const MAX_EMPTY: usize = 1 << 32;

impl Case {
    /// Reads the case file at `path`.
    ///
    /// Errors name the file and what is wrong with it: a header that is not one, a missing, unknown or misshapen tensor, a
    /// dtype that does not belong, an unknown metadata key, a value that is not a number.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| named(path, &e))?;
        Self::from_bytes(&bytes).map_err(|e| named(path, untraced(&e)))
    }

    /// [`Case::read`] of a file's content. Never panics, whatever the bytes; allocates no more than they hold.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let file = File::parse(bytes)?;
        let options = file.options()?;
        let case = Self {
            q: file.required("q")?,
            key_cache: file.required("key_cache")?,
            value_cache: file.required("value_cache")?,
            block_tables: file.required("block_tables")?,
            context_lens: file.required("context_lens")?,
            options,
            expected: file.optional("expected")?,
        };
        if let Some(expected) = &case.expected
            && expected.dims() != case.q.dims()
        {
            bail!("expected: shape {:?}, but q has {:?}", expected.dims(), case.q.dims())
        }
        case.check_query_len(file.number("query_len")?)?;
        Ok(case)
    }

    /// Writes the case to `path`: to a temporary file beside it, then renamed, so that a reader never sees half of one.
    ///
    /// Errors name the path.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let tensors = self.tensors().map_err(|e| named(path, untraced(&e)))?;
        let metadata = self.metadata().map_err(|e| named(path, untraced(&e)))?;
        safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|e| match e {
            // Its own words name the temporary file.
            safetensors::SafeTensorError::IoError(error) => named(path, &os_error(&error)),
            other => named(path, &other),
        })
    }

    /// The bytes that [`Case::write`] writes.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        Ok(safetensors::serialize(self.tensors()?, Some(self.metadata()?))?)
    }

    /// Tensors of the file, by name.
    fn tensors(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let options = &self.options;
        let mut tensors = vec![
            ("q", self.q.clone()),
            ("key_cache", self.key_cache.clone()),
            ("value_cache", self.value_cache.clone()),
            ("block_tables", self.block_tables.clone()),
            ("context_lens", self.context_lens.clone()),
        ];
        tensors.extend(scale_tensor(&options.k_scale, "k_scale", "key_block_scale")?);
        tensors.extend(scale_tensor(&options.v_scale, "v_scale", "value_block_scale")?);
        tensors.extend(options.sinks.clone().map(|t| ("sinks", t)));
        tensors.extend(options.query_start.clone().map(|t| ("query_start", t)));
        tensors.extend(self.expected.clone().map(|t| ("expected", t)));
        if let PlanChoice::Given(plan) = &options.plan {
            tensors.push(("work_info", plan.work_info().clone()));
            tensors.push(("reduce_info", plan.reduce_info().clone()));
        }
        for (name, tensor) in &tensors {
            check_dtype(name, tensor.dtype())?;
        }
        Ok(tensors)
    }

    /// Metadata of the file.
    fn metadata(&self) -> Result<HashMap<String, String>> {
        let options = &self.options;
        let plan = match &options.plan {
            PlanChoice::Default => None,
            PlanChoice::Free => Some("free".to_string()),
            PlanChoice::Given(_) => Some("given".to_string()),
        };
        let text = |n: Option<usize>| n.map(|n| n.to_string());
        let entries = [
            ("format", Some("pt".to_string())),
            ("query_len", text(self.query_len())),
            ("layout", Some(options.layout.name().to_string())),
            ("softmax_scale", options.softmax_scale.map(|x| x.to_string())),
            ("window", text(options.window)),
            ("softcap", options.softcap.map(|x| x.to_string())),
            ("max_partitions", text(options.max_partitions)),
            ("workgroup_budget", text(options.workgroup_budget)),
            ("plan", plan),
        ];
        Ok(entries.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect())
    }

    /// New tokens of each sequence, where all have the same number.
    fn query_len(&self) -> Option<usize> {
        let batch = self.context_lens.dims().first().copied()?;
        match self.options.query_start {
            Some(_) => None,
            None => query_rows(&self.q)?.checked_div(batch),
        }
    }

    fn check_query_len(&self, query_len: Option<usize>) -> Result<()> {
        let Some(query_len) = query_len else { return Ok(()) };
        if self.options.query_start.is_some() {
            bail!("query_len: {query_len}, but query_start gives each sequence its own")
        }
        let batch = self.context_lens.dims().first().copied().unwrap_or(0);
        let rows = query_rows(&self.q).unwrap_or(0);
        if query_len.checked_mul(batch) != Some(rows) {
            bail!("query_len: {query_len} for each of {batch} sequences, but q has {rows} rows")
        }
        Ok(())
    }
}

/// Rows of q, of either rank.
pub(super) fn query_rows(q: &Tensor) -> Option<usize> {
    match *q.dims() {
        [rows, _, _] => Some(rows),
        [batch, query_len, _, _] => batch.checked_mul(query_len),
        _ => None,
    }
}

/// An error of the file at `path`.
fn named(path: &Path, error: &dyn Display) -> candle::Error {
    candle::Error::Msg(format!("{}: {error}", path.display())).bt()
}

/// The error without the backtrace that candle's own display ends in.
fn untraced(error: &candle::Error) -> &candle::Error {
    match error {
        candle::Error::WithBacktrace { inner, .. } => untraced(inner),
        other => other,
    }
}

/// What the system said, without the name of the temporary file after it.
fn os_error(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.as_str(), |(said, _)| said).to_string()
}

/// A scale as a named tensor; a U8 tensor is MXFP4's.
fn scale_tensor(scale: &KvScale, plain: &'static str, block: &'static str) -> Result<Option<(&'static str, Tensor)>> {
    Ok(match scale {
        KvScale::None => None,
        KvScale::Scalar(x) => Some((plain, Tensor::from_slice(&[*x], 1, &Device::Cpu)?)),
        KvScale::Tensor(t) if t.dtype() == DType::U8 => Some((block, t.clone())),
        KvScale::Tensor(t) => Some((plain, t.clone())),
    })
}

/// Refuses a tensor that no case file holds, or a dtype that it cannot have.
fn check_dtype(name: &str, dtype: DType) -> Result<()> {
    let Some((_, allowed)) = TENSORS.iter().find(|(known, _)| *known == name) else {
        bail!("tensor {name:?}: not one that a case file holds ({})", TENSORS.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", "))
    };
    if !allowed.contains(&dtype) {
        bail!("{name}: dtype {dtype:?}, expected one of {allowed:?}")
    }
    Ok(())
}

/// A parsed file: header and data.
struct File<'a> {
    header: Metadata,
    data: &'a [u8],
}

impl<'a> File<'a> {
    /// Splits the bytes and checks everything that the header says about itself.
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
            bail!("not a safetensors file: {} bytes, and the header's length alone takes 8", bytes.len())
        };
        let length = u64::from_le_bytes(*length);
        let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
        let Some((header, data)) = split else {
            bail!("not a safetensors file: a header of {length} bytes, but only {} follow", rest.len())
        };
        let header: Metadata = match serde_json::from_slice(header) {
            Ok(header) => header,
            Err(error) => bail!("not a safetensors file: its header is not one ({error})"),
        };
        if header.data_len() != data.len() {
            bail!("safetensors header: its tensors take {} bytes, but {} follow", header.data_len(), data.len())
        }
        let file = Self { header, data };
        file.check_names()?;
        Ok(file)
    }

    /// Refuses unknown tensors and metadata keys, wrong dtypes and absurd shapes.
    fn check_names(&self) -> Result<()> {
        for (name, info) in self.header.tensors() {
            check_dtype(&name, dtype_of(&name, info)?)?;
            check_shape(&name, info)?;
        }
        let keys = self.header.metadata().iter().flat_map(HashMap::keys);
        if let Some(key) = keys.into_iter().find(|key| *key != "format" && !KEYS.contains(&key.as_str())) {
            bail!("metadata key {key:?}: not one of {}", KEYS.join(", "))
        }
        Ok(())
    }

    fn optional(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(info) = self.header.info(name) else { return Ok(None) };
        let (start, end) = info.data_offsets;
        let Some(bytes) = self.data.get(start..end) else { bail!("{name}: bytes {start}..{end} of {}", self.data.len()) };
        Ok(Some(Tensor::from_raw_buffer(bytes, dtype_of(name, info)?, &info.shape, &Device::Cpu)?))
    }

    fn required(&self, name: &str) -> Result<Tensor> {
        match self.optional(name)? {
            Some(tensor) => Ok(tensor),
            None => bail!("{name}: this tensor is missing"),
        }
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>> {
        match self.text(key).map(|text| (text, text.parse())) {
            None => Ok(None),
            Some((_, Ok(number))) => Ok(Some(number)),
            Some((text, Err(_))) => bail!("{key}: {text:?} is not a number ({})", std::any::type_name::<T>()),
        }
    }

    fn options(&self) -> Result<DecodeOptions> {
        let layout = match self.text("layout") {
            Some(name) => CacheLayout::from_name(name)?,
            None => CacheLayout::Nhd,
        };
        Ok(DecodeOptions {
            softmax_scale: self.number("softmax_scale")?,
            window: self.number("window")?,
            softcap: self.number("softcap")?,
            sinks: self.optional("sinks")?,
            k_scale: self.scale("key_cache", "k_scale", "key_block_scale")?,
            v_scale: self.scale("value_cache", "v_scale", "value_block_scale")?,
            layout,
            query_start: self.optional("query_start")?,
            max_query_len: None,
            plan: self.plan()?,
            max_partitions: self.number("max_partitions")?,
            workgroup_budget: self.number("workgroup_budget")?,
            validate: true,
            tables_settled: false,
        })
    }

    /// The scale of a cache: `block` for MXFP4, `plain` for every other dtype.
    fn scale(&self, cache: &str, plain: &str, block: &str) -> Result<KvScale> {
        let Some(info) = self.header.info(cache) else { bail!("{cache}: this tensor is missing") };
        let mxfp4 = KvDtype::of(dtype_of(cache, info)?)? == KvDtype::Mxfp4;
        let (wanted, other) = if mxfp4 { (block, plain) } else { (plain, block) };
        if self.header.info(other).is_some() {
            bail!("{other}: {cache} takes its scales from {wanted} ({})", if mxfp4 { "it is U8, MXFP4" } else { "it is not MXFP4" })
        }
        match self.optional(wanted)? {
            Some(scale) => Ok(KvScale::Tensor(scale)),
            None if mxfp4 => bail!("{wanted}: this tensor is missing ({cache} is U8, MXFP4)"),
            None => Ok(KvScale::None),
        }
    }

    fn plan(&self) -> Result<PlanChoice> {
        let given = ["work_info", "reduce_info"].into_iter().find(|name| self.header.info(name).is_some());
        match (self.text("plan"), given) {
            (Some("given"), _) => {
                let plan = DecodePlan::from_tensors(self.required("work_info")?, self.required("reduce_info")?)?;
                Ok(PlanChoice::Given(plan))
            }
            (_, Some(name)) => bail!("{name}: present, but the plan is not \"given\""),
            (Some("free"), _) => Ok(PlanChoice::Free),
            (Some(other), _) => bail!("plan: {other:?} is neither \"free\" nor \"given\""),
            (None, _) => Ok(PlanChoice::Default),
        }
    }
}

fn dtype_of(name: &str, info: &TensorInfo) -> Result<DType> {
    match DType::try_from(info.dtype) {
        Ok(dtype) => Ok(dtype),
        Err(_) => bail!("{name}: dtype {:?} is not one of a call's", info.dtype),
    }
}

/// Strides are products of dims, also where a tensor has no element: those products must not overflow.
/// (A tensor with elements has the bytes for them, which the header's check made sure of.)
fn check_shape(name: &str, info: &TensorInfo) -> Result<()> {
    let span = info.shape.iter().filter(|&&dim| dim > 0).try_fold(1usize, |n, &dim| n.checked_mul(dim));
    match span {
        Some(span) if span <= MAX_EMPTY || !info.shape.contains(&0) => Ok(()),
        _ => bail!("{name}: shape {:?} is too large", info.shape),
    }
}
