//! Adapters of experts as PEFT saves them, in both of its conventions, against PEFT's own deltas of the weights.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use aril::{
    DType,
    adapter::{
        Adapter, Orientation,
        layout::{B, LinearA},
    },
    cpu::AdapterPool,
    model::{Experts, Halves, ModelSpec, TpRank},
    plan::Capacity,
    pool::{PoolConfig, Source, StreamId},
};
use safetensors::SafeTensors;

const EXPERTS: usize = 4;
const HIDDEN: usize = 12;
/// The versions of PEFT that `make_experts.py` ran with.
const VERSIONS: [&str; 2] = ["0-18", "0-21"];

/// A model of `make_experts.py`.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    parent: &'static str,
    inter: usize,
    gated: bool,
    /// The orientation of its parameters.
    halves: Halves,
    transposed: bool,
    /// Whether its adapter has gate and up, and down.
    has: [bool; 2],
}

const QWEN3_MOE: Model = Model {
    name: "qwen3-moe",
    parent: "mlp",
    inter: 10,
    gated: true,
    halves: Halves::GateUp,
    transposed: false,
    has: [true; 2],
};

const NEMOTRON_H: Model = Model { name: "nemotron-h", parent: "mixer", gated: false, ..QWEN3_MOE };

const MODELS: [Model; 10] = [
    QWEN3_MOE,
    Model { name: "qwen3-moe-patterns", ..QWEN3_MOE },
    Model { name: "qwen3-moe-gate-up", has: [true, false], ..QWEN3_MOE },
    Model { name: "qwen3-moe-down", has: [false, true], ..QWEN3_MOE },
    Model { name: "mixtral", ..QWEN3_MOE },
    Model { name: "gpt-oss", inter: HIDDEN, halves: Halves::Interleaved, transposed: true, ..QWEN3_MOE },
    Model { name: "llama4", parent: "feed_forward", transposed: true, ..QWEN3_MOE },
    NEMOTRON_H,
    Model { name: "nemotron-h-square", inter: HIDDEN, ..NEMOTRON_H },
    Model { name: "modules", ..QWEN3_MOE },
];

impl Model {
    fn path(&self) -> String {
        format!("model.layers.0.{}.experts", self.parent)
    }

    /// PEFT's delta of one weight of an expert's module.
    fn delta(&self, tensors: &SafeTensors<'_>, module: &str, expert: usize, output: usize, input: usize) -> f32 {
        let read = |key: String, index: &[usize]| {
            let tensor = tensors.tensor(&format!("{}.{key}", self.path())).unwrap();
            let place = tensor.shape().iter().zip(index).fold(0, |place, (dim, index)| place * dim + index);
            bytemuck::pod_read_unaligned::<f32>(&tensor.data()[place * 4..][..4])
        };
        if self.name == "modules" {
            return read(format!("{expert}.{module}_proj.weight"), &[output, input]);
        }
        let (parameter, output) = match (module, self.gated, self.halves) {
            ("gate", true, Halves::Interleaved) => ("gate_up_proj", 2 * output),
            ("up", true, Halves::Interleaved) => ("gate_up_proj", 2 * output + 1),
            ("gate", true, _) => ("gate_up_proj", output),
            ("up", true, _) => ("gate_up_proj", self.inter + output),
            ("up", false, _) => ("up_proj", output),
            _ => ("down_proj", output),
        };
        let [row, col] = if self.transposed { [input, output] } else { [output, input] };
        read(parameter.to_owned(), &[expert, row, col])
    }

    fn check(&self, version: &str, adapter: &Adapter, tensors: &SafeTensors<'_>) {
        let mut spec = ModelSpec::new();
        let mut experts = Experts::new(self.path(), EXPERTS, HIDDEN, self.inter).stored_halves(self.halves);
        if self.transposed {
            experts = experts.stored_transposed();
        }
        if !self.gated {
            experts = experts.ungated();
        }
        let id = spec.experts(experts).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        let mut block = vec![0_f32; image.bytes() / 4];
        image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
        let first: &[&str] = if self.gated { &["gate", "up"] } else { &["up"] };
        let mut entries = 0;
        let projections = [(model[id].gate_up(), first), (model[id].down(), &["down"])];
        for ((projection, modules), _) in projections.into_iter().zip(self.has).filter(|(_, has)| *has) {
            let (inputs, outputs) = (projection.in_features(), projection.out_features() / modules.len());
            for expert in 0..EXPERTS {
                for (slice, module) in modules.iter().enumerate() {
                    let number = projection.expert_entry(expert) + slice;
                    let entry = image.entries().iter().find(|entry| entry.entry == number).unwrap();
                    entries += 1;
                    let rank = entry.rank;
                    let (a, b) = (LinearA { rank, in_features: inputs }, B { out_features: outputs, rank });
                    for (output, input) in (0..outputs).flat_map(|output| (0..inputs).map(move |input| (output, input)))
                    {
                        let product =
                            |r: usize| block[entry.a_elems + a.at(r, input)] * block[entry.b_elems + b.at(output, r)];
                        let got = entry.scaling * (0..rank).map(product).sum::<f32>();
                        let want = self.delta(tensors, module, expert, output, input);
                        assert!((got - want).abs() < 1e-6, "{} {version} {module} {expert}: {got} {want}", self.name);
                    }
                }
            }
        }
        assert_eq!(entries, image.entries().len());

        // A pool plans the adapter by the headers of its files, and then reads them.
        let source = Source::directory(folder(self.name, version), &model, DType::F32).unwrap();
        assert!(source.bytes() >= image.bytes(), "{} {version}", self.name);
        let capacity = Capacity::tokens(1).slots(1).rank(64);
        let mut pool = AdapterPool::new(&model, DType::F32, capacity, PoolConfig::arena_bytes(1 << 20)).unwrap();
        let id = pool.register(source).unwrap();
        pool.prefetch(id).unwrap();
        assert!(pool.wait(Duration::from_secs(60)));
        assert!(pool.acquire(id, StreamId::FIRST).is_ok(), "{} {version}", self.name);
    }
}

fn folder(name: &str, version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/experts").join(format!("{name}-{version}"))
}

fn open(name: &str, version: &str) -> (Adapter, Vec<u8>) {
    let folder = folder(name, version);
    (Adapter::open(&folder).unwrap(), fs::read(folder.join("delta.safetensors")).unwrap())
}

#[test]
fn experts_are_what_peft_adds() {
    for version in VERSIONS {
        for model in MODELS {
            let (adapter, deltas) = open(model.name, version);
            let tensors = SafeTensors::deserialize(&deltas).unwrap();
            let largest = tensors
                .tensors()
                .iter()
                .flat_map(|(_, tensor)| tensor.data().chunks(4))
                .fold(0_f32, |most, value| most.max(bytemuck::pod_read_unaligned::<f32>(value).abs()));
            assert!(largest > 0.1, "{} {version}: an adapter that does nothing shows nothing", model.name);
            model.check(version, &adapter, &tensors);
        }
    }
}

/// The versions' files differ if an expert's parameters are not transposed, or do not declare it.
#[test]
fn the_versions_have_their_conventions() {
    let takes_hidden = |name: &str| {
        VERSIONS.map(|version| {
            let (adapter, _) = open(name, version);
            let stack = adapter.stacks().iter().find(|stack| stack.path().ends_with("base_layer")).unwrap();
            assert_eq!(stack.a_shape()[0], stack.b_shape()[1]);
            if stack.a_shape()[1] == HIDDEN { Orientation::Forward } else { Orientation::Reversed }
        })
    };
    use Orientation::{Forward, Reversed};
    for name in ["qwen3-moe", "mixtral", "nemotron-h"] {
        assert_eq!(takes_hidden(name), [Reversed, Forward], "{name}");
    }
    assert_eq!(takes_hidden("gpt-oss"), [Forward, Forward]);
    assert_eq!(takes_hidden("llama4"), [Forward, Reversed]);
}
