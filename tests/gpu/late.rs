//! A kernel that lets its dependents start at once, where the device can, and writes late.

use std::{ffi::c_void, sync::Arc};

use cudarc::{
    driver::{CudaFunction, CudaStream, sys},
    nvrtc::Ptx,
};

use crate::device::{Buffer, Gpu};

/// Copies elements of 16 bits after a given time.
pub struct Late {
    kernel: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Late {
    const PTX: &str = r"
        .version 7.8
        .target TARGET
        .address_size 64
        .visible .entry late(.param .u64 from, .param .u64 to, .param .u32 count, .param .u64 nanoseconds)
        {
            .reg .pred %again, %done;
            .reg .b16 %value;
            .reg .b32 %i, %size, %block, %count;
            .reg .b64 %time, %start, %now, %past, %from, %to, %offset, %address;
            DEPENDENTS
            mov.u64 %start, %globaltimer;
            ld.param.u64 %from, [from];
            ld.param.u64 %to, [to];
            ld.param.u32 %count, [count];
            ld.param.u64 %time, [nanoseconds];
            mov.u32 %i, %tid.x;
            mov.u32 %size, %ntid.x;
            mov.u32 %block, %ctaid.x;
            mad.lo.u32 %i, %block, %size, %i;
            mov.u32 %block, %nctaid.x;
            mul.lo.u32 %size, %block, %size;
        spin:
            mov.u64 %now, %globaltimer;
            sub.u64 %past, %now, %start;
            setp.lt.u64 %again, %past, %time;
            @%again bra spin;
            WAIT
        next:
            setp.ge.u32 %done, %i, %count;
            @%done ret;
            mul.wide.u32 %offset, %i, 2;
            add.u64 %address, %from, %offset;
            ld.global.b16 %value, [%address];
            add.u64 %address, %to, %offset;
            st.global.b16 [%address], %value;
            add.u32 %i, %i, %size;
            bra next;
        }
    ";
    const THREADS: u32 = 1024;
    /// Few enough that all blocks run at once: dependents start when all of them have begun.
    const MAX_BLOCKS: u32 = 64;

    pub fn new(gpu: &Gpu) -> Self {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let has_dependents = gpu.context.attribute(attribute).unwrap() >= 9;
        let (target, dependents, wait) = match has_dependents {
            true => ("sm_90", "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"),
            false => ("sm_80", "", ""),
        };
        let ptx = Self::PTX.replace("TARGET", target).replace("DEPENDENTS", dependents).replace("WAIT", wait);
        let kernel = gpu.context.load_module(Ptx::from_src(ptx)).unwrap().load_function("late").unwrap();
        Self { kernel, stream: gpu.stream.clone() }
    }

    /// Enqueues it: after so many microseconds, `to` begins with all of `from`.
    pub fn copy(&self, from: &Buffer, to: &Buffer, microseconds: u64) {
        self.enqueue(from, to, microseconds, false);
    }

    /// The same, but it starts as soon as the kernel in front lets it.
    pub fn copy_behind(&self, from: &Buffer, to: &Buffer, microseconds: u64) {
        self.enqueue(from, to, microseconds, true);
    }

    fn enqueue(&self, from: &Buffer, to: &Buffer, microseconds: u64, starts_early: bool) {
        assert!(from.region().bytes <= to.region().bytes, "there is no room for the copy");
        let count = u32::try_from(from.region().bytes / 2).unwrap();
        let (from, to, nanoseconds) = (from.address(), to.address(), microseconds * 1000);
        let mut arguments = [
            (&raw const from).cast_mut().cast(),
            (&raw const to).cast_mut().cast(),
            (&raw const count).cast_mut().cast(),
            (&raw const nanoseconds).cast_mut().cast::<c_void>(),
        ];
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: count.div_ceil(Self::THREADS).clamp(1, Self::MAX_BLOCKS),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: Self::THREADS,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: starts_early.into(),
        };
        self.stream.context().bind_to_thread().unwrap();
        // SAFETY: the kernel has these parameters, and the caller keeps both buffers until the stream is synchronized.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.kernel.cu_function(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .unwrap();
    }
}
