//! The fuzz target: loading, planning and packing an adapter must not panic, whatever the bytes.

use std::fs;

use aril::{
    DType,
    adapter::{Adapter, AdapterError},
    model::{Experts, Linear, ModelSpec, Parallel, Shard, TpRank},
};

/// Reads two bytes as the length of the configuration, then the configuration, then the weight file.
pub(crate) fn run(data: &[u8]) {
    let Some((&[low, high], rest)) = data.split_first_chunk() else { return };
    let (config, weights) = rest.split_at(usize::from(u16::from_le_bytes([low, high])).min(rest.len()));
    load(config, weights);
}

/// Loads an adapter from the bytes of its two files: mapped, copied and from memory.
pub(crate) fn load(config: &[u8], weights: &[u8]) {
    let Ok(dir) = tempfile::tempdir() else { return };
    let write = |name: &str, bytes| fs::write(dir.path().join(name), bytes).is_ok();
    if !(write("adapter_config.json", config) && write("adapter_model.safetensors", weights)) {
        return;
    }
    let opened = Adapter::open(dir.path());
    let others = [
        // SAFETY: nobody modifies the files of this folder, which is gone when this returns.
        unsafe { Adapter::map(dir.path()) }.is_ok(),
        str::from_utf8(config).is_ok_and(|config| Adapter::from_safetensors(config, [weights.to_vec()]).is_ok()),
    ];
    assert_eq!(others, [opened.is_ok(); 2]);
    let Ok(mut adapter) = opened else { return };
    let _ = adapter.compare_base_weights(|_| Ok::<_, AdapterError>(true));
    // A model that fits the adapter, if one exists.
    let Ok(rank) = TpRank::new(1, 2) else { return };
    let mut spec = ModelSpec::new();
    for module in adapter.modules() {
        let (inputs, outputs) = (module.in_features(), module.out_features());
        let layer = |parallel| Linear::new("", parallel, inputs).slice(module.path(), outputs);
        let parallel = if outputs.is_multiple_of(rank.size()) { Parallel::Column } else { Parallel::Replicated };
        let _ = spec.linear(layer(parallel));
    }
    for stack in adapter.stacks() {
        let (a, b) = (stack.a_shape(), stack.b_shape());
        let (Some(&experts), Some(&hidden), Some(&inter)) = (a.first(), a.last(), b.get(1)) else { continue };
        let path = stack.path().trim_end_matches(".base_layer");
        for path in [path, path.rsplit_once('.').map_or("", |(parent, _)| parent)] {
            let _ = spec.experts(Experts::new(path, experts.min(4), hidden, inter));
        }
    }
    let shard = Shard::new(rank).experts_tp(TpRank::SINGLE);
    let model = spec.shard(shard).expect("every layer divides over two ranks");
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let Ok(image) = adapter.plan(&model, dtype) else { continue };
        let _ = image.write_to(&mut vec![0; image.bytes()]);
    }
}
