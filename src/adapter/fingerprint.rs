//! What the ranks of a group know an adapter by.

use std::ops::Range;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::{error::AdapterError, open::Adapter, tensor::Tensor};
use crate::digest;

/// Bytes of a factor that a thread reads at once.
const PART_BYTES: usize = 1 << 20;

impl Adapter {
    /// A number that depends on the configuration, and on the names, the shapes and all bytes of the factors, which it
    /// reads on rayon's threads. It does not depend on how the factors are stored in files, nor on the rank.
    pub(crate) fn fingerprint(&self) -> Result<u64, AdapterError> {
        let modules = self.modules.iter().map(|module| (&module.path, vec![&module.a.tensor, &module.b.tensor]));
        let stacks = self.stacks.iter().chain(&self.empty).map(|stack| (&stack.path, vec![&stack.a.1, &stack.b.1]));
        let rows = self.rows.iter().map(|rows| (&rows.path, vec![&rows.rows.tensor]));
        let mut parts: Vec<(&Tensor, Range<usize>)> = Vec::new();
        let described = modules.chain(stacks).chain(rows).map(|(path, factors)| {
            for &tensor in &factors {
                let bytes = tensor.shape().iter().product::<usize>() * tensor.dtype().bytes();
                let starts = (0..bytes).step_by(PART_BYTES);
                parts.extend(starts.map(|start| (tensor, start..bytes.min(start + PART_BYTES))));
            }
            digest::of_bytes(format!("{path} {factors:?}").as_bytes())
        });
        let config = self.config.digest ^ self.orientation.map_or(0, |orientation| orientation as u64 + 1);
        let described = described.fold(config, digest::mix);
        let part = |buffer: &mut Vec<u8>, (tensor, range): (&Tensor, Range<usize>)| {
            Ok(digest::of_bytes(tensor.read(range, buffer)?))
        };
        let parts: Result<Vec<_>, AdapterError> = parts.into_par_iter().map_init(Vec::new, part).collect();
        Ok(parts?.into_iter().fold(described, digest::mix))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        DType,
        adapter::files::{Access, Opener},
    };

    /// An adapter of two modules, each factor of which takes several parts.
    fn adapter(config: &str, names: [&str; 2], changed: Option<usize>) -> (Adapter, Vec<(String, Vec<u8>)>) {
        let tensors: Vec<_> = (0..4)
            .map(|number| {
                let mut values: Vec<f32> = (0..300_000).map(|i| ((i * 7 + number) % 1009) as f32).collect();
                if let Some(at) = changed.filter(|at| at / 300_000 == number) {
                    values[at % 300_000] += 1.0;
                }
                let (name, side) = (names[number / 2], ["A", "B"][number % 2]);
                (format!("{name}.lora_{side}.weight"), bytemuck::cast_slice(&values).to_vec())
            })
            .collect();
        let tensor = |(name, bytes): &(String, Vec<u8>)| {
            let shape = if name.contains("lora_A") { [4, 75_000] } else { [75_000, 4] };
            (name.clone(), Tensor::new(DType::F32, shape, bytes.clone()).unwrap())
        };
        (Adapter::from_tensors(config, tensors.iter().map(tensor)).unwrap(), tensors)
    }

    const CONFIG: &str = r#"{"peft_type": "LORA", "lora_alpha": 1}"#;

    #[test]
    fn each_part_of_an_adapter_counts() {
        let fingerprint = |config, names, changed| adapter(config, names, changed).0.fingerprint().unwrap();
        let of = fingerprint(CONFIG, ["m.q", "m.v"], None);
        assert_eq!(of, fingerprint(CONFIG, ["m.q", "m.v"], None));
        let mut others: Vec<_> = [0, 299_999, 300_000, 600_000, 1_199_999]
            .map(|changed| fingerprint(CONFIG, ["m.q", "m.v"], Some(changed)))
            .into();
        others.push(fingerprint(r#"{"peft_type": "LORA", "lora_alpha": 2}"#, ["m.q", "m.v"], None));
        others.push(fingerprint(CONFIG, ["m.q", "m.k"], None));
        others.push(fingerprint(CONFIG, ["m.v", "m.q"], None));
        others.push(of);
        let count = others.len();
        others.sort_unstable();
        others.dedup();
        assert_eq!(others.len(), count);
    }

    /// Whether the factors are in memory or in files, and in which order these have them.
    #[test]
    fn the_storage_of_an_adapter_does_not_count() {
        let (adapter, tensors) = adapter(CONFIG, ["m.q", "m.v"], None);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("adapter_config.json"), CONFIG).unwrap();
        let views = tensors.iter().map(|(name, bytes)| {
            let shape = if name.contains("lora_A") { vec![4, 75_000] } else { vec![75_000, 4] };
            (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &dir.path().join("adapter_model.safetensors")).unwrap();
        for access in [Access::Copy, Access::InPlace] {
            let (read, _) = Adapter::load(dir.path(), access, &Opener::default()).unwrap();
            assert_eq!(read.fingerprint().unwrap(), adapter.fingerprint().unwrap(), "{access:?}");
        }
    }
}
