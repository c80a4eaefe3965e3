//! NCCL's stand-in for tensors in ordinary memory: a call works on a copy in the memory of a simulated device.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use burn::tensor::{Device, Tensor, TensorData};
use paceline_fake_cuda::{Library, Room};
use paceline_nccl::{Before, DeviceBuffer, NcclOptions, Places, Probe};

use crate::ddp::{Backend, Reduction};
use crate::error::DdpError;
use crate::reducer::{Lent, NcclDevice, NcclGroup, NcclMemory, Setup, lock};

/// A machine with a device for each rank of any test.
static LIBRARY: LazyLock<Arc<Library>> = LazyLock::new(|| {
    let library = Library::whole();
    library.load(r#"{"devices": 8}"#);
    Arc::new(library)
});

/// The devices, for one job at a time: a device's wait for a call holds up all its streams, so two jobs would wait for each other.
pub(crate) fn devices() -> MutexGuard<'static, ()> {
    static DEVICES: Mutex<()> = Mutex::new(());
    lock(&DEVICES)
}

/// The device of a rank.
pub(crate) struct StandIn {
    ordinal: usize,
}

/// NCCL's collectives between the ranks of `setup`, with the device of this number.
pub(crate) fn group(
    setup: &Setup,
    ordinal: usize,
    reduction: Reduction,
) -> Result<NcclGroup<StandIn>, DdpError> {
    let options = NcclOptions {
        probe: Probe::None,
        places: Places {
            nccl: Some(LIBRARY.nccl()),
            cuda: Some(LIBRARY.driver()),
            ..Places::from_env()
        },
        ..NcclOptions::default()
    };
    let on = NcclDevice {
        device: &Device::flex(),
        ordinal,
        backend: Backend::Nccl,
        reduction,
    };
    let group = NcclGroup::join(setup, on, StandIn { ordinal }, &options)?;
    Ok(group.expect("each rank has a device"))
}

impl NcclMemory for StandIn {
    fn lend(&self, tensor: Tensor<1>, _: bool) -> Result<Lent, DdpError> {
        let (device, dtype, len) = (tensor.device(), tensor.dtype(), tensor.dims()[0]);
        let data = tensor.into_data();
        let room = Arc::new(Room::new(&LIBRARY, self.ordinal, data.as_bytes()));
        Ok(Lent {
            buffer: DeviceBuffer {
                ptr: room.address,
                bytes: room.bytes,
                keep: Box::new(room.clone()),
            },
            before: Before::Now,
            back: Box::new(move |ticket| {
                ticket.expect("NCCL was called").wait()?;
                let data = TensorData::from_bytes_vec(room.read(), [len], dtype);
                Ok(Tensor::from_data(data, (&device, dtype)))
            }),
        })
    }
}
