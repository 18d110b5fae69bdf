//! Tensors go to the device and come back.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::rocm::RocmTensor;

use crate::support::*;

const DTYPES: [DType; 10] =
    [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64, DType::F8E4M3];

/// Values that every dtype has, in a tensor of `dtype`.
fn numbers(shape: &[usize], dtype: DType) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| (i * 7 % 16) as f32).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    match dtype {
        DType::F32 => tensor,
        dtype => tensor.to_dtype(dtype).unwrap(),
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let to = match tensor.dtype() {
        DType::U8 => return tensor.flatten_all().unwrap().to_vec1().unwrap(),
        DType::F8E4M3 => {
            let values: Vec<float8::F8E4M3> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            return values.iter().map(|value| value.to_bits()).collect();
        }
        _ => DType::F64,
    };
    let values: Vec<f64> = tensor.to_dtype(to).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[track_caller]
fn assert_same(got: &Tensor, want: &Tensor) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
    assert!(bytes(got) == bytes(want), "{:?} {:?}", want.dtype(), want.dims());
}

#[test]
fn every_dtype_and_shape_comes_back_as_it_went() {
    let _beside = beside_others();
    let device = device();
    for dtype in DTYPES {
        for shape in [&[][..], &[1], &[0], &[3, 0, 2], &[5, 7], &[2, 3, 4, 5], &[70_001]] {
            let tensor = numbers(shape, dtype);
            let there = RocmTensor::from_tensor(&tensor, &device).unwrap();
            assert_eq!((there.dims(), there.dtype()), (shape, dtype));
            assert_same(&there.to_tensor().unwrap(), &tensor);
        }
    }
}

#[test]
fn fp8_is_moved_as_its_bytes_nans_included() {
    let _beside = beside_others();
    let device = device();
    let all: Vec<_> = (0..=255).map(float8::F8E4M3::from_bits).collect();
    let tensor = Tensor::from_vec(all, 256, &Device::Cpu).unwrap();
    let back = RocmTensor::from_tensor(&tensor, &device).unwrap().to_tensor().unwrap();
    assert_eq!(bytes(&back), (0..=255).collect::<Vec<u8>>());
}

#[test]
fn strided_host_tensors_keep_their_values() {
    let _beside = beside_others();
    let device = device();
    for dtype in DTYPES {
        let tensor = numbers(&[4, 6, 10], dtype);
        let views = [
            tensor.transpose(0, 2).unwrap(),
            tensor.narrow(1, 2, 3).unwrap(),
            tensor.narrow(0, 1, 2).unwrap(),
            tensor.narrow(2, 3, 4).unwrap().permute((2, 0, 1)).unwrap(),
            tensor.narrow(0, 1, 1).unwrap().broadcast_as((5, 6, 10)).unwrap(),
        ];
        for view in views {
            let there = RocmTensor::from_tensor(&view, &device).unwrap();
            assert!(there.is_contiguous());
            assert_same(&there.to_tensor().unwrap(), &view.contiguous().unwrap());
        }
    }
}

#[test]
fn views_share_the_memory_and_come_back_with_their_own_values() {
    let _beside = beside_others();
    let device = device();
    for dtype in DTYPES {
        // Keys and values as the two halves of each page.
        let pages = numbers(&[5, 2, 4, 8], dtype);
        let there = RocmTensor::from_tensor(&pages, &device).unwrap();
        for half in 0..2 {
            let view = there.select(1, half).unwrap();
            assert_eq!((view.dims(), view.stride()), (&[5, 4, 8][..], &[64, 8, 1][..]));
            assert_eq!(view.address() - there.address(), (half * 32 * dtype.size_in_bytes()) as u64);
            assert_same(&view.to_tensor().unwrap(), &pages.narrow(1, half, 1).unwrap().squeeze(1).unwrap().contiguous().unwrap());
        }
        let turned = there.transpose(0, 3).unwrap().narrow(3, 1, 3).unwrap();
        assert_same(&turned.to_tensor().unwrap(), &pages.transpose(0, 3).unwrap().narrow(3, 1, 3).unwrap().contiguous().unwrap());
        let reshaped = there.narrow(0, 2, 3).unwrap().reshape((6, 32)).unwrap();
        assert_same(&reshaped.to_tensor().unwrap(), &pages.narrow(0, 2, 3).unwrap().reshape((6, 32)).unwrap());
    }
}

#[test]
fn more_than_a_piece_goes_in_pieces() {
    let _beside = beside_others();
    let device = device();
    let tensor = counting((32 << 20) / 4 + 12_345);
    let there = RocmTensor::from_tensor(&tensor, &device).unwrap();
    assert_eq!(device.counts().copies, 2);
    assert_same(&there.to_tensor().unwrap(), &tensor);
}

#[test]
fn contents_are_filled_overwritten_and_copied() {
    let _beside = beside_others();
    let device = device();
    let there = RocmTensor::zeros((4, 8), DType::F32, &device).unwrap();
    assert_eq!(values(&there), vec![0.0; 32]);
    there.narrow(0, 1, 2).unwrap().fill_bytes(0xff).unwrap();
    assert_eq!(values(&there).iter().map(|x| x.is_nan()).collect::<Vec<_>>(), (0..32).map(|i| (8..24).contains(&i)).collect::<Vec<_>>());
    there.narrow(0, 1, 2).unwrap().copy_from(&counting(16).reshape((2, 8)).unwrap()).unwrap();
    there.narrow(0, 3, 1).unwrap().copy_from_device(&there.narrow(0, 2, 1).unwrap()).unwrap();
    let want: Vec<f32> = (0..32).map(|i| [0, i - 8, i - 8, i - 16][i as usize / 8] as f32).collect();
    assert_eq!(values(&there), want);
    let counts = device.counts();
    assert_eq!((counts.fills, counts.copies, counts.launches), (2, 5, 0));
}

#[test]
fn what_cannot_be_is_refused_by_name() -> Result<()> {
    let _beside = beside_others();
    let (device, other) = (device(), device());
    let there = RocmTensor::zeros((4, 8), DType::F32, &device)?;
    let column = there.narrow(1, 0, 1)?;
    assert_error(there.copy_from(&counting(32)), &["copy", "[32]", "[4, 8]"]);
    assert_error(there.copy_from(&counting(32).reshape((4, 8))?.to_dtype(DType::F16)?), &["copy", "F16", "F32"]);
    assert_error(column.copy_from(&counting(4).reshape((4, 1))?), &["copy", "[4, 1]", "[8, 1]", "not contiguous"]);
    assert_error(column.fill_bytes(0), &["fill", "not contiguous"]);
    assert_error(column.reshape(4), &["reshape", "not contiguous"]);
    assert_error(there.reshape(31), &["reshape", "[4, 8]", "31"]);
    assert_error(there.squeeze(0), &["squeeze", "dimension 0", "[4, 8]"]);
    assert_error(there.squeeze(7), &["squeeze", "dimension 7"]);
    assert_error(there.select(0, 4), &["narrow"]);
    assert_error(there.narrow(0, usize::MAX, 2), &["narrow"]);
    assert_error(there.copy_from_device(&RocmTensor::zeros((4, 8), DType::F32, &other)?), &["copy", "different devices"]);
    assert_error(there.copy_from_device(&there), &["copy", "overlap"]);
    assert_error(RocmTensor::empty((usize::MAX, 2), DType::F32, &device), &["more bytes"]);
    let storage = there.storage();
    assert_error(storage.fill(100, 29, 0), &["fill", "29 bytes from 100", "128 bytes"]);
    assert_error(storage.copy_from(usize::MAX, storage, 0, 2), &["copy to"]);
    assert_error(storage.copy_from(0, storage, 127, 2), &["copy from"]);
    assert_error(RocmTensor::from_storage(storage.clone(), 64, 17, DType::F32), &["68 bytes from 64"]);
    assert_error(RocmTensor::from_storage(storage.clone(), 2, 4, DType::F32), &["offset 2", "F32"]);
    Ok(())
}

#[test]
fn an_upload_is_one_copy_with_every_part_at_a_multiple_of_256_bytes() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let parts: [&[u8]; 5] = [&[1; 3], &[], &[2; 256], &[3; 257], &[4; 70_000]];
    let upload = device.upload(&parts)?;
    assert_eq!(device.counts().copies, 1);
    for (i, part) in parts.iter().enumerate() {
        assert_eq!(upload.address(i)? % 256, 0);
        let back: Vec<u8> = upload.tensor(i, part.len(), DType::U8)?.to_tensor()?.to_vec1()?;
        assert_eq!(back, *part);
    }
    assert_eq!(upload.storage().bytes(), 256 + 256 + 512 + 70_000);
    assert_error(upload.address(5), &["no part 5 of 5"]);
    assert_error(upload.tensor(4, 70_001, DType::U8), &["70001 bytes"]);
    assert_eq!(device.upload(&[])?.storage().address(), 0);
    let large = [vec![5; 20 << 20], vec![6; 20 << 20]];
    let upload = device.upload(&[&large[0], &large[1]])?;
    for (i, part) in large.iter().enumerate() {
        assert!(upload.tensor(i, part.len(), DType::U8)?.to_tensor()?.to_vec1::<u8>()? == *part);
    }
    let slice = RocmTensor::from_slice(&[1u32, 2, 3, 4], (2, 2), &device)?;
    assert_eq!(slice.to_tensor()?.to_vec2::<u32>()?, [[1, 2], [3, 4]]);
    Ok(())
}

#[test]
fn uploads_do_not_wait_and_no_buffer_is_overwritten_before_its_copy_is_done() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let uploads: Vec<_> = (0..500u32).map(|i| device.upload(&[&i.to_le_bytes()])).collect::<Result<_>>()?;
    assert_eq!(device.counts().synchronizations, 0);
    for (i, upload) in uploads.iter().enumerate() {
        assert_eq!(upload.tensor(0, 1, DType::U32)?.to_tensor()?.to_vec1::<u32>()?, [i as u32]);
    }
    // More than is kept pinned: waits, if the device is that far behind, and is right all the same.
    let large: Vec<Vec<u8>> = (0..20u8).map(|i| vec![i; 30 << 20]).collect();
    let uploads: Vec<_> = large.iter().map(|data| device.upload(&[data])).collect::<Result<_>>()?;
    for (upload, data) in uploads.iter().zip(&large) {
        assert!(upload.tensor(0, data.len(), DType::U8)?.to_tensor()?.to_vec1::<u8>()? == *data);
    }
    Ok(())
}

#[test]
fn threads_share_a_device() {
    let _beside = beside_others();
    let device = device();
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let device = &device;
            scope.spawn(move || {
                for round in 0..50 {
                    let tensor = (counting(1000 + round) + (thread * 1000) as f64).unwrap();
                    let there = RocmTensor::from_tensor(&tensor, device).unwrap();
                    let copy = RocmTensor::empty(1000 + round, DType::F32, device).unwrap();
                    copy.copy_from_device(&there).unwrap();
                    drop(there);
                    assert_same(&copy.to_tensor().unwrap(), &tensor);
                }
            });
        }
    });
    assert_eq!((device.counts().live_bytes, device.counts().live_allocations), (0, 0));
}
