//! The reference forward: where the multi-LoRA calls go in a Qwen3 or Qwen3.5.
//!
//! Each call follows the base operation whose output it adds to: the embedding, the four GEMMs of a layer (q, k and v
//! fused, or the projections of a gated delta net; the one behind them; gate and up fused; down), and the
//! language-model head; behind those of the embedding and the head, trained rows replace the base's. In steps of few
//! tokens on the GPU, a layer's GEMM
//! and its deltas are one call. In steps of many, the deltas of gate and up and the activation are one. In a layer with
//! experts, the calls replace the activation and the combine, after two grouped GEMMs of any base. With many routes on
//! the GPU they come before the base's activation and combine instead. The router is a linear layer, whose scores have
//! their deltas before the experts are chosen. All calls of a step share one [`LoraStep`](Device::LoraStep), made from
//! one slot per token. The head has another step, because it sees only the sampled rows. The rest of the forward does
//! not know about adapters.
//!
//! On several ranks, each has some of the heads, of the intermediate features and of the vocabulary. The layers in
//! front of an all-reduce compute partial sums, to which each rank adds the delta of its part of A. With expert
//! parallelism, each rank has some of the experts instead of a part of each. It has all tokens, and adds up the routes
//! to its own experts. Every rank has the whole router.

use std::cell::RefCell;

use aril::{Element, Slot, plan::MAX_FORWARD_TOKENS};

use crate::{
    config::Config,
    device::{BlockTable, Cache, DeltaNet, Device, HeadNorms, Places, Rope, Slots},
    error::Result,
    model::{Dense, Experts, Layer, Linear, Mixer, Mlp, Model, Shared},
};

/// The tokens of all requests that run in one pass, packed without padding.
#[derive(Debug, Default)]
pub struct Step {
    /// The id of each token.
    pub ids: Vec<u32>,
    /// The position of each token in its sequence.
    pub positions: Vec<u32>,
    /// The row of each token's sequence in the block table.
    pub sequences: Vec<u32>,
    /// The cache rows of the sequences.
    pub table: BlockTable,
    /// The adapter of each token, which lets requests of different adapters share a batch.
    pub slots: Vec<Slot>,
    /// A factor on the adapter's own scaling, for each token.
    pub scales: Vec<f32>,
    /// The rows whose next token is sampled.
    pub sampled: Vec<u32>,
    /// Whether it is known that no adapter of the step has factors of a router. Then no operation runs for them.
    pub keeps_routers: bool,
}

impl Step {
    /// The tokens without a neighbour of their sequence; `None` if no token has one.
    fn alone(&self) -> Option<Vec<u32>> {
        let mut runs = self.sequences.chunk_by(|a, b| a == b);
        if runs.clone().all(|run| run.len() == 1) {
            return None;
        }
        let mut end = 0;
        let mut alone = Vec::new();
        for run in runs.by_ref() {
            if run.len() == 1 {
                alone.push(end);
            }
            end += u32::try_from(run.len()).unwrap_or(u32::MAX);
        }
        Some(alone)
    }
}

/// Steps of up to this many tokens run base weights and adapters in one launch, in the layers where that is fastest.
pub const FUSED_TOKENS: usize = MAX_FORWARD_TOKENS;

/// Which linear layers of a step run base weights and adapters in one launch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fusion {
    /// No layer: each has its GEMM and its delta.
    None,
    /// Those that are fastest so with this many tokens of few adapters.
    Fastest(usize),
}

impl Fusion {
    /// Of a step of any adapters.
    const fn of(tokens: usize) -> Self {
        if tokens <= FUSED_TOKENS { Self::Fastest(tokens) } else { Self::None }
    }
}

/// How the layers of a step that are in the stack run.
pub enum Stacked<'a, D: Device> {
    /// As those that are not.
    No,
    /// By a GEMM of all rows, for the bits that base tokens have beside any adapters, and with deltas as without a
    /// stack.
    Rows,
    /// By a GEMM of all rows, with deltas of the stack, which has the adapters of the batch.
    Deltas(&'a D::Stack),
}

impl<D: Device> Clone for Stacked<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Stacked<'_, D> {}

impl<D: Device> Stacked<'_, D> {
    /// Whether the GEMM has the rows of the stack.
    pub fn has_rows(&self) -> bool {
        !matches!(self, Self::No)
    }
}

/// The indices of a step on the device.
pub struct Inputs<D: Device> {
    /// The id of each token.
    pub ids: D::Indices,
    /// The place of each token.
    pub places: Places<D>,
}

/// The adapters of a step.
pub struct Lora<'a, 's, D: Device> {
    /// The library's step.
    pub step: &'a mut D::LoraStep<'s>,
    /// Whether a token has one. If not, no operation runs that only adds deltas.
    pub has_adapters: bool,
    /// Whether one of them may have factors of a router.
    pub changes_routers: bool,
    /// Which layers run as their fused linears.
    pub fusion: Fusion,
    /// How the layers in the stack run.
    pub stacked: Stacked<'a, D>,
}

impl<D: Device> Lora<'_, '_, D> {
    /// Whether a layer runs as its fused linear.
    fn is_fused(&self, device: &D, layer: &D::LoraLinear, fused: &D::FusedLinear<'_>) -> bool {
        match self.fusion {
            Fusion::None => false,
            Fusion::Fastest(tokens) => device.is_fastest_fused(layer, fused, tokens),
        }
    }
}

/// The linear layers of a layer with their base weights, for steps of few tokens.
struct FusedLayer<'m, D: Device + 'm> {
    input: Option<D::FusedLinear<'m>>,
    output: Option<D::FusedLinear<'m>>,
    /// Of the MLP that all tokens go through.
    gate_up: Option<D::FusedLinear<'m>>,
    down: Option<D::FusedLinear<'m>>,
}

/// What a layer's mixer keeps of the sequences.
pub enum Kept<'m, D: Device + 'm> {
    /// Keys and values, whose heads have these norms.
    Cache(&'m HeadNorms<D>, Cache<D>),
    /// The states of a gated delta net.
    States(&'m DeltaNet<D>, D::States),
}

/// The state kept from step to step.
pub struct Session<'m, D: Device + 'm> {
    /// What the layers keep.
    pub state: State<'m, D>,
    /// What the library's steps share.
    pub buffers: D::Buffers,
}

/// What the layers keep.
pub struct State<'m, D: Device + 'm> {
    fused: Vec<FusedLayer<'m, D>>,
    fused_head: Option<D::FusedLinear<'m>>,
    /// By layer.
    pub kept: Vec<Kept<'m, D>>,
    rope: Rope<D>,
    grouping: D::Grouping,
}

impl<D: Device> Model<'_, D> {
    /// Sets up a run of up to `sequences` sequences at a time on a cache of `rows` rows, the longest of them with
    /// `positions` positions.
    ///
    /// # Errors
    ///
    /// If the device has no memory for it.
    pub fn session<'m>(&'m self, rows: usize, positions: usize, sequences: usize) -> Result<Session<'m, D>> {
        let Self { device, heads, routes, adapters, layers, .. } = self;
        let features = heads.kv_features();
        let kept = |layer: &'m Layer<D>| {
            Ok(match &layer.mixer {
                Mixer::Attention(norms) => {
                    let [keys, values] = [(); 2].map(|()| device.zeros(rows, features));
                    Kept::Cache(norms, Cache { keys: keys?, values: values? })
                }
                Mixer::DeltaNet(net) => Kept::States(net, device.states(sequences, net.heads)?),
            })
        };
        let fused = |layer: &'m Linear<D>| device.fused_linear(adapters, layer.id, &layer.base);
        let head = self.head.as_ref().unwrap_or(&self.embed);
        let fused_layer = |layer: &'m Layer<D>| {
            let (gate_up, down) = match layer.mlp.dense() {
                Some(Dense { gate_up, down }) => (fused(gate_up)?, fused(down)?),
                None => (None, None),
            };
            Ok(FusedLayer { input: fused(&layer.input)?, output: fused(&layer.output)?, gate_up, down })
        };
        let state = State {
            fused: layers.iter().map(fused_layer).collect::<Result<_>>()?,
            fused_head: device.fused_linear(adapters, self.head_id, head)?,
            kept: layers.iter().map(kept).collect::<Result<_>>()?,
            rope: self.rope(positions)?,
            grouping: device.grouping(*routes)?,
        };
        Ok(Session { state, buffers: device.buffers(adapters)? })
    }

    /// Runs a step of all requests and returns the logits of the sampled rows: `[sampled, vocab]`.
    ///
    /// # Errors
    ///
    /// If the step exceeds the table's capacity or names a slot without a lease, or the device fails.
    pub fn forward(&self, adapters: Slots<'_, D>, session: &mut Session<'_, D>, step: &Step) -> Result<D::Tensor> {
        self.forward_on(adapters, session, step, &self.inputs(step)?)
    }

    /// [`forward`](Self::forward), of indices on the device.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_on(
        &self,
        adapters: Slots<'_, D>,
        session: &mut Session<'_, D>,
        step: &Step,
        inputs: &Inputs<D>,
    ) -> Result<D::Tensor> {
        let Self { device, .. } = self;
        let Session { state, buffers } = session;
        let mut lora = device.lora_step(adapters, buffers, &step.slots, &step.scales)?;
        let has_adapters = step.slots.iter().any(|&slot| slot != Slot::BASE);
        let fusion = Fusion::of(step.ids.len());
        let has_rows = self.has_stacked_rows(step.ids.len());
        let mut stack = self.stack.as_ref().filter(|_| has_rows).map(RefCell::borrow_mut);
        let is_placed = stack.as_deref_mut().map(|stack| device.place(stack, &mut lora)).transpose()?;
        let stacked = match (&stack, is_placed) {
            (Some(stack), Some(true)) => Stacked::Deltas(&**stack),
            (Some(_), _) => Stacked::Rows,
            (None, _) => Stacked::No,
        };
        let changes_routers = has_adapters && !step.keeps_routers;
        let h =
            self.hidden(state, inputs, &mut Lora { step: &mut lora, has_adapters, changes_routers, fusion, stacked })?;
        drop(lora);

        let sampled = step.sampled.iter().map(|&row| row as usize);
        let slots: Vec<Slot> = sampled.clone().map(|row| step.slots[row]).collect();
        let scales: Vec<f32> = sampled.map(|row| step.scales[row]).collect();
        let mut lora = device.lora_step(adapters, buffers, &slots, &scales)?;
        let h = device.gather(&h, &device.indices(&step.sampled)?)?;
        let fusion = Fusion::of(step.sampled.len());
        self.logits(
            state,
            &h,
            &mut Lora { step: &mut lora, has_adapters, changes_routers, fusion, stacked: Stacked::No },
        )
    }

    /// Whether the GEMMs of steps of so many tokens have the rows of the stack.
    pub fn has_stacked_rows(&self, tokens: usize) -> bool {
        let Some(stack) = self.stack.as_ref().filter(|_| tokens > FUSED_TOKENS) else { return false };
        let is_fastest = |layer: &Layer<D>| self.device.is_fastest_stacked(&layer.input.lora, &stack.borrow(), tokens);
        self.layers.first().is_some_and(is_fastest)
    }

    /// Uploads the indices of a step.
    ///
    /// # Errors
    ///
    /// If the device has no memory for them.
    pub fn inputs(&self, step: &Step) -> Result<Inputs<D>> {
        let BlockTable { ref first_rows, columns, block_rows, ref states } = step.table;
        let places = step.sequences.iter().zip(&step.positions);
        let rows: Vec<u32> = places.map(|(&sequence, &position)| step.table.row(sequence, position)).collect();
        let indices = |values: &[u32]| self.device.indices(values);
        let places = Places {
            positions: indices(&step.positions)?,
            sequences: indices(&step.sequences)?,
            rows: indices(&rows)?,
            table: BlockTable { first_rows: indices(first_rows)?, columns, block_rows, states: indices(states)? },
            alone: step.alone().map(|tokens| indices(&tokens)).transpose()?,
        };
        Ok(Inputs { ids: indices(&step.ids)?, places })
    }

    /// Runs the layers, and returns the hidden states of all tokens: `[tokens, hidden]`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn hidden(
        &self,
        State { fused, kept, rope, grouping, .. }: &mut State<'_, D>,
        Inputs { ids, places }: &Inputs<D>,
        lora: &mut Lora<'_, '_, D>,
    ) -> Result<D::Tensor> {
        let Self { device, .. } = *self;
        let of_rank;
        let ids = match self.first_token {
            0 => ids,
            first => {
                of_rank = device.subtract(ids, first)?;
                &of_rank
            }
        };
        let mut h = device.embed(&self.embed, ids)?;
        if lora.has_adapters {
            device.add_embedding_delta(&self.embed_lora, lora.step, ids, &mut h)?;
            device.replace_embeddings(&self.rows, lora.step, ids, &mut h)?;
        }
        device.all_reduce(&mut h)?;

        // What the layer before adds to h.
        let mut added: Option<D::Tensor> = None;
        for ((layer, fused), kept) in self.layers.iter().zip(&*fused).zip(kept) {
            let x = match &added {
                None => device.rms_norm(&h, &layer.input_norm)?,
                Some(y) => device.add_rms_norm(&mut h, y, &layer.input_norm)?,
            };
            let x = self.linear(&x, layer.input.parts(), fused.input.as_ref(), lora)?;
            let x = match kept {
                Kept::Cache(norms, cache) => self.attention(x, norms, (rope, places), cache)?,
                Kept::States(net, states) => device.delta_net(&x, net, places, states)?,
            };
            let mut y = self.linear(&x, layer.output.parts(), fused.output.as_ref(), lora)?;
            device.all_reduce(&mut y)?;

            let x = device.add_rms_norm(&mut h, &y, &layer.post_norm)?;
            let mut y = match &layer.mlp {
                Mlp::Dense(dense) => self.dense(&x, dense, fused, lora)?,
                Mlp::Sparse(experts) => {
                    let mut y = self.experts(&x, experts, grouping, lora)?;
                    if let Some(Shared { mlp, gate }) = &experts.shared {
                        let mut shared = self.dense(&x, mlp, fused, lora)?;
                        device.gate(&mut shared, &self.linear(&x, gate.parts(), None, lora)?, None)?;
                        device.add(&mut y, &shared)?;
                    }
                    y
                }
            };
            device.all_reduce(&mut y)?;
            added = Some(y);
        }
        if let Some(y) = added {
            device.add(&mut h, &y)?;
        }
        Ok(h)
    }

    /// The logits of hidden states: `[tokens, vocab]`.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn logits(&self, state: &State<'_, D>, h: &D::Tensor, lora: &mut Lora<'_, '_, D>) -> Result<D::Tensor> {
        let x = self.device.rms_norm(h, &self.norm)?;
        let base = self.head.as_ref().unwrap_or(&self.embed);
        let mut logits = self.linear(&x, (base, &self.head_lora), state.fused_head.as_ref(), lora)?;
        if lora.has_adapters {
            self.device.replace_logits(&self.rows, lora.step, &x, &mut logits)?;
        }
        self.device.all_gather(logits, self.config.vocab)
    }

    /// On the rank's part of a layer, the base model's GEMM and the delta of every token's adapter: all that multi-LoRA
    /// needs in a linear layer. Where it is faster, one operation of the library does both.
    fn linear(
        &self,
        x: &D::Tensor,
        (base, layer): (&D::Weight, &D::LoraLinear),
        fused: Option<&D::FusedLinear<'_>>,
        lora: &mut Lora<'_, '_, D>,
    ) -> Result<D::Tensor> {
        if let Some(fused) = fused.filter(|fused| lora.is_fused(self.device, layer, fused)) {
            return self.device.forward(fused, lora.step, x);
        }
        if lora.has_adapters {
            return self.device.gemm_with_deltas(x, (base, layer), lora.step, lora.stacked);
        }
        self.device.gemm(x, base, lora.stacked)
    }

    /// Attention behind its projections.
    fn attention(
        &self,
        x: D::Tensor,
        norms: &HeadNorms<D>,
        (rope, places): (&Rope<D>, &Places<D>),
        cache: &mut Cache<D>,
    ) -> Result<D::Tensor> {
        let Self { device, heads, .. } = *self;
        let (mut qkv, gates) = if heads.is_gated { (device.without_gates(&x, heads)?, Some(x)) } else { (x, None) };
        device.rotate_and_append(&mut qkv, heads, norms, rope, places, cache)?;
        let mut x = device.attention(&qkv, heads, places, cache)?;
        if let Some(gates) = gates {
            device.gate(&mut x, &gates, Some(heads))?;
        }
        Ok(x)
    }

    /// A dense MLP.
    fn dense(
        &self,
        x: &D::Tensor,
        Dense { gate_up, down }: &Dense<D>,
        fused: &FusedLayer<'_, D>,
        lora: &mut Lora<'_, '_, D>,
    ) -> Result<D::Tensor> {
        let x = self.gate_up(x, gate_up, fused.gate_up.as_ref(), lora)?;
        self.linear(&x, down.parts(), fused.down.as_ref(), lora)
    }

    /// Gate and up of a dense MLP, their deltas, and `silu(gate) · up`.
    fn gate_up(
        &self,
        x: &D::Tensor,
        layer: &Linear<D>,
        fused: Option<&D::FusedLinear<'_>>,
        lora: &mut Lora<'_, '_, D>,
    ) -> Result<D::Tensor> {
        let Self { device, .. } = self;
        if let Some(out) = device.gate_up_of_many(x, layer.parts(), lora.step, lora.stacked)? {
            return Ok(out);
        }
        device.silu_mul(&self.linear(x, layer.parts(), fused, lora)?)
    }

    /// The base model's grouped GEMMs, over rows that are sorted by expert, and every token's adapter with the
    /// activation and with the combine. A step without adapters needs neither of the library's operations.
    fn experts(
        &self,
        x: &D::Tensor,
        layer: &Experts<D>,
        grouping: &mut D::Grouping,
        Lora { step, has_adapters, changes_routers, .. }: &mut Lora<'_, '_, D>,
    ) -> Result<D::Tensor> {
        let Self { device, .. } = self;
        let Experts { router, top_k, normalized, held, gate_up, down, lora, .. } = layer;
        let adapted = changes_routers.then_some(&mut **step);
        let routes = device.choose_experts(x, router.parts(), adapted, (*top_k, *normalized), held.clone())?;
        if !*has_adapters {
            let out = device.experts_without_adapters(lora, x, &routes, &**gate_up, &**down)?;
            if let Some(out) = out {
                return Ok(out);
            }
        }
        let mut grouped = device.group(grouping, step, &routes)?;
        let gate_up = gate_up.run_on_tokens(device, x, &routes)?;
        let inter = device.activate(lora, step, &mut grouped, x, gate_up)?;
        let down = down.run(device, &inter, &routes)?;
        device.combine(lora, step, &mut grouped, &inter, down)
    }

    /// Frequencies and angles in `f32`, their cosines and sines rounded to the element type, all as transformers has
    /// them.
    #[expect(clippy::cast_possible_truncation, reason = "where transformers rounds")]
    fn rope(&self, positions: usize) -> Result<Rope<D>> {
        let Config { rotary, rope_theta, .. } = self.config;
        let theta = rope_theta as f32;
        let frequencies: Vec<f32> =
            (0..rotary).step_by(2).map(|feature| 1.0 / theta.powf(feature as f32 / rotary as f32)).collect();
        let angles: Vec<f32> = (0..positions)
            .flat_map(|position| frequencies.iter().map(move |frequency| position as f32 * frequency))
            .collect();
        let table = |function: fn(f64) -> f64| {
            let round = |&angle: &f32| D::Elem::from_f32(function(f64::from(angle)) as f32);
            let values: Vec<_> = angles.iter().map(round).collect();
            self.device.tensor(positions, frequencies.len(), &values)
        };
        Ok(Rope { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }
}
