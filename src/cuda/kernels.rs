//! Loading the kernels, and calls of the C ABI.

use std::{
    ffi::{CStr, c_void},
    sync::Arc,
};

use cudarc::driver::{CudaContext, result, sys};
use libloading::Library;

use super::LaunchError;
use crate::{ffi, plan::Device};

/// Whether a CUDA driver is installed. Without one, everything else in this module fails with an error.
pub fn driver_is_present() -> bool {
    // cudarc knows only if it loads the driver itself; a dependant may link the driver instead.
    // SAFETY: loading the driver's library has no preconditions, and it stays loaded while anything else uses it.
    #[expect(unsafe_code, reason = "loads a library")]
    ["libcuda.so.1", "libcuda.so"].into_iter().any(|name| unsafe { Library::new(name) }.is_ok())
}

/// An operation of the C ABI, with its arguments and the stream.
pub(super) type Operation<Args> = unsafe extern "C" fn(*const Args, *mut c_void) -> i32;

/// The kernels, loaded into one CUDA context.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Kernels {
    /// The `CUcontext`, for comparison only.
    context: usize,
    device: Device,
}

impl Kernels {
    /// Loads every kernel into the thread's current context, so that no launch has to, and waits for short kernels
    /// which test what the others rely on: that the device starts thread blocks in order of their index, and what a
    /// kernel reads that [starts early](Self::start_early).
    ///
    /// # Errors
    /// [`LaunchError`] if there is no driver or no current context, this build has no code for the device, or the test
    /// fails.
    pub fn load() -> Result<Self, LaunchError> {
        if !driver_is_present() {
            return Err(LaunchError::NoDriver);
        }
        let context = result::ctx::get_current()?.ok_or(LaunchError::WrongContext { operand: "the thread" })?;
        // SAFETY: a context is current.
        #[expect(unsafe_code, reason = "FFI")]
        let status = unsafe { ffi::aril_load() };
        check(status)?;
        Ok(Self { context: context as usize, device: describe(current_device()?)? })
    }

    /// Like [`load`](Self::load), into a cudarc context, which becomes current on this thread.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_into(context: &CudaContext) -> Result<Self, LaunchError> {
        context.bind_to_thread()?;
        Self::load()
    }

    /// Whether kernels start while the one in front drains (programmatic dependent launch), as they do on devices of
    /// compute capability 9.0 and newer. They do not, in the whole process, once a device was loaded on which a kernel
    /// that starts early reads what the routing was before, or with a build that has code for older devices alone:
    /// results stay right, and each launch takes some microseconds more.
    pub fn start_early() -> bool {
        // SAFETY: it has no preconditions.
        #[expect(unsafe_code, reason = "FFI")]
        let early = unsafe { ffi::aril_kernels_start_early() };
        early != 0
    }

    /// The same kernels with plans for another device: they launch on this one what a device with fewer
    /// multiprocessors, or less shared memory, gets. A launch that asks for more shared memory than this device has is
    /// an error.
    #[must_use]
    pub fn planned_for(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// The device of plans: the context's, unless they are [for another](Self::planned_for). With code for older
    /// devices alone, its compute capability is theirs.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Rejects a thread with another current context, which the CUDA runtime would launch into.
    pub(super) fn check_thread(&self) -> Result<(), LaunchError> {
        match result::ctx::get_current()? {
            Some(context) if context as usize == self.context => Ok(()),
            _ => Err(LaunchError::WrongContext { operand: "the thread" }),
        }
    }

    /// The context, which must be current on this thread, as one of cudarc's. Rejects any but the primary context of a
    /// device: cudarc would destroy others.
    pub(super) fn primary_context(&self) -> Result<Arc<CudaContext>, LaunchError> {
        self.check_thread()?;
        let current = result::ctx::get_current()?;
        // It becomes current.
        let primary = CudaContext::new(usize::try_from(current_device()?).unwrap_or(0))?;
        let Err(error) = self.check_context("the stream", &primary) else { return Ok(primary) };
        // It becomes current once more when cudarc drops it.
        drop(primary);
        if let Some(current) = current {
            // SAFETY: it was current on this thread.
            #[expect(unsafe_code, reason = "FFI")]
            unsafe { result::ctx::set_current(current) }?;
        }
        Err(error)
    }

    /// Enqueues an operation on `num_tokens` tokens, if there are any.
    ///
    /// # Safety
    /// The arguments and their memory are as the operation requires.
    #[expect(unsafe_code, reason = "FFI")]
    pub(super) unsafe fn launch<Args>(
        &self,
        operation: Operation<Args>,
        args: &Args,
        num_tokens: i32,
        stream: *mut c_void,
    ) -> Result<(), LaunchError> {
        self.check_thread()?;
        if num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: the caller's obligations.
        check(unsafe { operation(args, stream) })
    }

    /// Rejects an operand of another context.
    pub(super) fn check_context(&self, operand: &'static str, context: &CudaContext) -> Result<(), LaunchError> {
        if context.cu_ctx() as usize == self.context { Ok(()) } else { Err(LaunchError::WrongContext { operand }) }
    }
}

/// The device of the current context, which is its ordinal.
fn current_device() -> Result<sys::CUdevice, LaunchError> {
    let mut device = 0;
    // SAFETY: a context is current, and the pointer is valid for the call.
    #[expect(unsafe_code, reason = "FFI")]
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.result()?;
    Ok(device)
}

/// A device, for plans.
fn describe(device: sys::CUdevice) -> Result<Device, LaunchError> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = |attribute| {
        // SAFETY: the device is that of a context.
        #[expect(unsafe_code, reason = "FFI")]
        unsafe {
            result::device::get_attribute(device, attribute)
        }
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut code = 0;
    // SAFETY: the kernels are loaded, and the pointer is valid for the call.
    #[expect(unsafe_code, reason = "FFI")]
    check(unsafe { ffi::aril_code_version(&raw mut code) })?;
    let size = |attribute_of| Ok::<_, LaunchError>(usize::try_from(attribute(attribute_of)?).unwrap_or(0));
    Ok(Device {
        // PTX of a build for older devices alone has what these have.
        compute_capability: if major >= 9 && code < 90 { (code / 10, code % 10) } else { (major, minor) },
        multiprocessors: size(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: size(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_bytes_per_multiprocessor: size(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        reserved_shared_bytes: size(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
    })
}

/// Converts a status of the C ABI.
pub(super) fn check(status: i32) -> Result<(), LaunchError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes any status.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { ffi::aril_status_string(status) };
    // SAFETY: it returns a static string.
    #[expect(unsafe_code, reason = "FFI")]
    let message = unsafe { CStr::from_ptr(message) };
    Err(LaunchError::Kernel { status, message: message.to_string_lossy().into_owned() })
}

#[cfg(test)]
#[expect(unsafe_code, reason = "FFI")]
mod tests {
    use std::{mem, ptr};

    use super::*;
    use crate::{
        DType,
        model::{Experts, Linear, ModelSpec, Parallel, TpRank},
        plan::{BatchBounds, Capacity, ExpertsBatch, ExpertsPlan, Inputs, LinearPlan, int, sharded_launch},
    };

    /// Calls an operation without blocks on arguments that `set` sets; all others are zero. It needs no device to be
    /// refused.
    fn call<Args>(operation: Operation<Args>, set: impl Fn(&mut Args)) -> i32 {
        // SAFETY: arguments are numbers and addresses.
        let mut args: Args = unsafe { mem::zeroed() };
        set(&mut args);
        // SAFETY: nothing reads the addresses.
        unsafe { operation(&raw const args, ptr::null_mut()) }
    }

    /// Every operation refuses a null operand, whichever it is, and not the operands that it does not have.
    #[test]
    fn operands_that_are_null_are_refused() {
        let at = |is_null| if is_null { ptr::null_mut::<c_void>() } else { ptr::without_provenance_mut(256) };
        let ffi::aril_dtype(f32) = ffi::aril_dtype::ARIL_F32;
        let dtype = f32.cast_signed();
        for null in 0..=3 {
            let [first, second, third] = [1, 2, 3].map(|operand| at(operand == null));
            let linear = |args: &mut ffi::aril_linear_args| {
                (args.dtype, args.num_slices, args.plan.k_tiles_per_split, args.x) = (dtype, 2, 1, first);
                (args.y[0].first, args.y[1].first) = (second, third);
            };
            let is_refused = |has: &[i32], status| assert_eq!(status == ffi::ARIL_ERR_ARGUMENT, has.contains(&null));
            is_refused(&[1, 2, 3], call(ffi::aril_linear, linear));
            is_refused(&[1], call(ffi::aril_linear_shrink, linear));
            is_refused(&[2, 3], call(ffi::aril_linear_expand, linear));
            let silu_mul = |args: &mut ffi::aril_silu_mul_args| {
                linear(&mut args.layer);
                args.out = first;
            };
            is_refused(&[1, 2, 3], call(ffi::aril_silu_mul, silu_mul));
            let embedding = |args: &mut ffi::aril_embedding_args| {
                (args.dtype, args.token_ids, args.y) = (dtype, first.cast(), second);
            };
            is_refused(&[1, 2], call(ffi::aril_embedding, embedding));
            let rows = |args: &mut ffi::aril_rows_args| {
                (args.dtype, args.token_ids, args.x, args.y) = (dtype, first.cast(), second, third);
            };
            is_refused(&[1, 3], call(ffi::aril_replace_embeddings, rows));
            is_refused(&[2, 3], call(ffi::aril_replace_logits, rows));
            let sharded = |args: &mut ffi::aril_sharded_args| {
                (args.dtype, args.num_slices, args.x, args.v) = (dtype, 1, first, second.cast());
                args.y[0].first = third;
            };
            is_refused(&[1, 2], call(ffi::aril_sharded_shrink, sharded));
            is_refused(&[2, 3], call(ffi::aril_sharded_expand, sharded));
            for (form, has) in [
                (ffi::aril_experts_form::ARIL_ADD, &[1, 2][..]),
                (ffi::aril_experts_form::ARIL_WRITE, &[1, 2]),
                (ffi::aril_experts_form::ARIL_ADD_COMBINED, &[1, 2]),
                (ffi::aril_experts_form::ARIL_ACTIVATE, &[1, 2, 3]),
                (ffi::aril_experts_form::ARIL_COMBINE, &[1, 2, 3]),
            ] {
                let experts = |args: &mut ffi::aril_experts_args| {
                    (args.dtype, args.form) = (dtype, form.0.cast_signed());
                    (args.x, args.y, args.out, args.top_k.ids) = (first, second, third, at(false).cast());
                };
                is_refused(has, call(ffi::aril_experts, experts));
            }
            let pack = |args: &mut ffi::aril_pack_args| {
                (args.dtype, args.source_dtype, args.num_factors, args.not_finite) = (dtype, dtype, 1, first.cast());
                (args.factors[0].source, args.factors[0].target) = (second, third);
            };
            is_refused(&[1, 2, 3], call(ffi::aril_pack, pack));
        }
        let refused = [
            call(ffi::aril_route, |args: &mut ffi::aril_route_args| args.num_tokens = 1),
            call(ffi::aril_group, |args: &mut ffi::aril_group_args| args.num_tokens = 1),
            call(ffi::aril_experts, |args: &mut ffi::aril_experts_args| {
                (args.dtype, args.x, args.y) = (dtype, at(false), at(false));
            }),
        ];
        assert_eq!(refused, [ffi::ARIL_ERR_ARGUMENT; 3]);
    }

    /// Shared memory of every plan is what its kernels need: with a byte less, the launch is refused. Without blocks,
    /// it needs no device.
    #[test]
    fn plans_have_the_shared_memory_that_kernels_need() {
        let address = ptr::without_provenance_mut::<c_void>(256);
        let dtypes = [(DType::BF16, ffi::aril_dtype::ARIL_BF16), (DType::F16, ffi::aril_dtype::ARIL_F16)];
        let ranks = [1, 8, 16, 17, 40, 64, 72, 128, 129, 200, 512];
        let bounds = |num_tokens, table_rank| BatchBounds { num_tokens, small_tiles: 0, wide_tiles: 0, table_rank };
        let is_needed = |what: &str, with: &dyn Fn(i32) -> i32| {
            assert!(with(0) > 0, "{what} is refused: {}", with(0));
            assert_eq!(with(-1), ffi::ARIL_ERR_ARGUMENT, "{what} may have less");
        };
        for ((dtype, ffi::aril_dtype(code)), rank) in dtypes.into_iter().flat_map(|d| ranks.map(|rank| (d, rank))) {
            let (layer, experts) = described(dtype, rank);
            let weights = |args: &mut ffi::aril_weights| args.max_rank = int(rank);
            for num_tokens in [1, 9, 16, 200, 512, 513, 4096] {
                let what = |operation| format!("{operation} of {num_tokens} tokens in {dtype} at rank {rank}");
                let linear = |args: &mut ffi::aril_linear_args, plan| {
                    (args.dtype, args.num_tokens, args.in_features) = (code.cast_signed(), int(num_tokens), 4096);
                    (args.num_slices, args.out_features[0], args.out_features[1]) = (2, 4096, 4096);
                    (args.x, args.plan, args.y[0].first, args.y[1].first) = (address, plan, address, address);
                    weights(&mut args.weights);
                };
                let plan = layer.launch(bounds(num_tokens, rank));
                let with = |shrink, expand| {
                    let shrink_smem_bytes = plan.shrink_smem_bytes + shrink;
                    let plan =
                        ffi::aril_linear_plan { smem_bytes: plan.smem_bytes + expand, shrink_smem_bytes, ..plan };
                    move |args: &mut ffi::aril_linear_args| linear(args, plan)
                };
                if plan.large_m == 0 {
                    is_needed(&what("both"), &|less| call(ffi::aril_linear, with(0, less)));
                } else {
                    is_needed(&what("shrink"), &|less| call(ffi::aril_linear_shrink, with(less, 0)));
                    let expands = |less: i32| call(ffi::aril_linear_expand, with(0, less));
                    assert!(expands(0) > 0, "{}: more, for a second stage", what("expand"));
                }
                let plan = layer.silu_mul_launch(bounds(num_tokens, rank));
                let silu_mul = |less: i32| {
                    call(ffi::aril_silu_mul, |args: &mut ffi::aril_silu_mul_args| {
                        linear(&mut args.layer, ffi::aril_linear_plan { smem_bytes: plan.smem_bytes + less, ..plan });
                        args.out = address;
                    })
                };
                assert!(
                    silu_mul(0) > 0 && (plan.wide != 0 || silu_mul(-1) == ffi::ARIL_ERR_ARGUMENT),
                    "{}",
                    what("silu_mul")
                );
                let plan = sharded_launch([4096].into_iter(), rank, bounds(num_tokens, rank));
                is_needed(&what("expand of a shard"), &|less| {
                    call(ffi::aril_sharded_expand, |args: &mut ffi::aril_sharded_args| {
                        (args.dtype, args.num_slices, args.num_outs[0]) = (code.cast_signed(), 1, 4096);
                        (args.v, args.y[0].first) = (address.cast(), address);
                        args.plan = ffi::aril_sharded_plan { smem_bytes: plan.smem_bytes + less, ..plan };
                        weights(&mut args.weights);
                    })
                });
                for form in [ffi::aril_experts_form::ARIL_ADD, ffi::aril_experts_form::ARIL_ACTIVATE] {
                    let batch = ExpertsBatch {
                        bounds: bounds(num_tokens, rank),
                        top_k: 8,
                        is_grouped: false,
                        inputs: Inputs::InFront,
                    };
                    let plan = experts.gate_up().launch(form, batch);
                    let with = |less: i32| {
                        call(ffi::aril_experts, |args: &mut ffi::aril_experts_args| {
                            (args.dtype, args.num_tokens) = (code.cast_signed(), int(num_tokens));
                            (args.form, args.from_tokens) = (form.0.cast_signed(), 1);
                            (args.x, args.y, args.out) = (address, address, address);
                            (args.top_k.ids, args.top_k.top_k, args.top_k.num_experts) = (address.cast(), 8, 128);
                            args.plan = ffi::aril_experts_plan {
                                smem_bytes: plan.smem_bytes + less,
                                groups_routes: 0,
                                blocks: 0,
                                shrink_blocks: 0,
                                expand_blocks: 0,
                                wide_shrink_blocks: 0,
                                ..plan
                            };
                            weights(&mut args.weights);
                        })
                    };
                    is_needed(&what("experts"), &with);
                }
            }
        }
    }

    /// A layer of gate and up, and experts.
    fn described(dtype: DType, rank: usize) -> (LinearPlan, ExpertsPlan) {
        let mut spec = ModelSpec::new();
        let gate_up = Linear::new("m", Parallel::Replicated, 4096).slice("gate", 4096).slice("up", 4096);
        let layer = spec.linear(gate_up).expect("it is described once");
        let experts = spec.experts(Experts::new("e", 128, 2048, 768).top_k(8)).expect("they are described once");
        let model = spec.shard(TpRank::SINGLE).expect("one rank has all of it");
        let capacity = Capacity::tokens(8192).slots(8).rank(rank);
        let plan = LinearPlan::new(&model[layer], dtype, capacity).expect("kernels have it");
        (plan, ExpertsPlan::new(&model[experts], dtype, capacity).expect("kernels have them"))
    }
}
