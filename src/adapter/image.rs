//! The image of an adapter in a slot: one contiguous block, identical on the host and on the device.
//!
//! Factors are stored one after the other in the formats of [`layout`](super::layout), each aligned to
//! [`ALIGNMENT_BYTES`](super::layout::ALIGNMENT_BYTES).

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    ops::Range,
};

use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::rectangle::FactorOnDevice;
use super::{
    error::AdapterError,
    layout::{self, B, EmbeddingA, K_TILE, LinearA, RowIds},
    nested::{Writing, is_nested},
    rectangle::{Part, Rectangle},
};
use crate::{
    DType, Element,
    error::LoadError,
    model::{MAX_RANK, Model, RowsPart},
    sizes::{product, sum},
};

/// The smallest limit that [`SlotImage::pieces`] accepts, in bytes.
pub const MIN_STAGING_BYTES: usize = MAX_RANK * K_TILE * size_of::<f32>();

/// A planned and checked image of an adapter on one tensor-parallel rank. Weights are read when it is written.
#[derive(Debug)]
pub struct SlotImage<'a> {
    adapter: u64,
    dtype: DType,
    model: Model,
    entries: Vec<ImageEntry>,
    shared: Vec<SharedEntry>,
    rows: Vec<RowsEntry>,
    /// On this rank or another.
    has_trained_rows: bool,
    /// The factors, in order.
    parts: Vec<Rectangle<'a>>,
    elems: usize,
}

/// The place of one module in an image.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ImageEntry {
    /// Descriptor-table entry of the module.
    pub entry: usize,
    /// Offset of A in the block, in elements.
    pub a_elems: usize,
    /// Rows of A in the block: the rank, or, in a [fully sharded](crate::model::Shard::fully_sharded) layer, fewer or
    /// none.
    pub a_rank: usize,
    /// Offset of B in the block, in elements.
    pub b_elems: usize,
    /// The rank, at least 1.
    pub rank: usize,
    /// The scaling, α/r or α/√r.
    pub scaling: f32,
}

/// What the experts of a layer have in common, for one module: the largest rank, and the factors that all share.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SharedEntry {
    /// Descriptor-table entry: [`ProjectionSite::shared_entry`](crate::model::ProjectionSite::shared_entry) plus the
    /// slice.
    pub entry: usize,
    /// Offset of A in the block, in elements, if A is shared.
    pub a_elems: Option<usize>,
    /// Offset of B in the block, in elements, if B is shared.
    pub b_elems: Option<usize>,
    /// The largest rank of an expert's module, at least 1.
    pub rank: usize,
}

/// The place of trained rows in an image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RowsEntry {
    /// Descriptor-table entry: [`RowsSite::first_entry`](crate::model::RowsSite::first_entry), or the one behind it.
    pub entry: usize,
    /// Offset of the [ids](super::layout::RowIds) in the block, in elements.
    pub ids_elems: usize,
    /// Offset of the [rows](super::layout::Rows) in the block, in elements.
    pub rows_elems: usize,
    /// The number of rows, at least 1.
    pub count: usize,
}

impl<'a> SlotImage<'a> {
    /// An image without modules of the adapter with this number.
    pub(super) fn new(adapter: u64, dtype: DType, model: &Model) -> Self {
        Self {
            adapter,
            dtype,
            model: model.clone(),
            entries: Vec::new(),
            shared: Vec::new(),
            rows: Vec::new(),
            has_trained_rows: false,
            parts: Vec::new(),
            elems: 0,
        }
    }

    /// Appends a factor, or a part without elements, to the block, and returns its offset in elements.
    pub(super) fn place(&mut self, source: Rectangle<'a>) -> usize {
        let (begin, elems) = (self.elems, source.block_elems());
        if elems > 0 {
            self.elems += elems;
            self.parts.push(source);
        }
        begin
    }

    /// Adds a module whose factors are at these offsets. Modules may share a factor.
    pub(super) fn push(&mut self, entry: ImageEntry) {
        self.entries.push(entry);
    }

    /// Adds what experts have in common. Their own entries do not depend on it.
    pub(super) fn share(&mut self, entry: usize, rank: usize, a_elems: Option<usize>, b_elems: Option<usize>) {
        self.shared.push(SharedEntry { entry, a_elems, b_elems, rank });
    }

    /// Takes note that the adapter has trained rows, which may be those of other ranks.
    pub(super) fn set_trained_rows(&mut self) {
        self.has_trained_rows = true;
    }

    /// Whether the adapter has trained rows, on this rank or another.
    pub(crate) fn has_trained_rows(&self) -> bool {
        self.has_trained_rows
    }

    /// Adds trained rows of a module, which are at these offsets.
    pub(super) fn push_rows(&mut self, entry: RowsEntry) {
        self.rows.push(entry);
    }

    /// A number of the adapter, which no other one has.
    pub(crate) fn adapter(&self) -> u64 {
        self.adapter
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The largest size of an image in bytes, of adapters of ranks up to `max_rank` that have factors for all modules
    /// of this rank's model, and as many trained rows. `usize::MAX` if it is larger.
    pub fn max_bytes(model: &Model, dtype: DType, max_rank: usize) -> usize {
        let max_rank = max_rank.min(MAX_RANK);
        let factors = |a_rank, in_features, out_features| {
            LinearA { rank: a_rank, in_features }.elems() + B { out_features, rank: max_rank }.elems()
        };
        let linear = model.linears().iter().flat_map(|site| {
            let a_rank = site.a_rows(max_rank).len();
            site.slices().iter().map(move |slice| factors(a_rank, site.in_features(), slice.b_rows().len))
        });
        let embeddings = model.embeddings().iter().map(|site| {
            let a = EmbeddingA { vocab: site.range().len(), rank: max_rank };
            a.elems() + B { out_features: site.hidden(), rank: max_rank }.elems()
        });
        let experts = model.expert_layers().iter().flat_map(|site| {
            [site.gate_up(), site.down()].into_iter().flat_map(move |projection| {
                let slices = projection.slices().iter();
                let of_slice = move |output| factors(max_rank, projection.in_features(), output);
                slices.map(move |slice| product(&[site.held().len(), of_slice(slice.output.len)]))
            })
        });
        let rows = model.trained_rows().iter().flat_map(|site| {
            let elems = |part: &RowsPart| {
                let count = max_rank.min(part.range.len());
                RowIds { count }.elems() + layout::Rows { count, hidden: site.hidden() }.elems()
            };
            [&site.embedding, &site.head].map(elems)
        });
        product(&[sum(linear.chain(embeddings).chain(experts).chain(rows)), dtype.bytes()])
    }

    /// Element type of the block.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Entries per slot of the model, adapted or not.
    pub fn num_entries(&self) -> usize {
        self.model.num_entries()
    }

    /// The adapted modules, each with a distinct entry.
    pub fn entries(&self) -> &[ImageEntry] {
        &self.entries
    }

    /// What the experts of each adapted layer have in common, for each of its modules. Their entries are distinct from
    /// those of [`entries`](Self::entries).
    pub fn shared(&self) -> &[SharedEntry] {
        &self.shared
    }

    /// The trained rows, each with a distinct entry.
    pub fn rows(&self) -> &[RowsEntry] {
        &self.rows
    }

    /// The largest rank of all modules.
    pub fn max_rank(&self) -> usize {
        self.entries.iter().map(|entry| entry.rank).max().unwrap_or(0)
    }

    /// Size of the block, in bytes.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// Writes the block in the formats of [`layout`](super::layout), on rayon's threads. Weights are converted to the
    /// block's element type by rounding to nearest, ties to even.
    ///
    /// # Errors
    /// [`AdapterError::Unrepresentable`] if a weight is NaN or infinite, or becomes infinite by rounding.
    ///
    /// # Panics
    /// If `block.len() != self.bytes()`.
    pub fn write_to(&self, block: &mut [u8]) -> Result<(), AdapterError> {
        assert_eq!(block.len(), self.bytes(), "the block must have the image's size");
        write_parts(self.dtype, &self.parts, block)
    }

    /// The factors, in the order of the block; `None` if not all are in the memory of a device, each as one matrix.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self) -> Option<Vec<FactorOnDevice<'a>>> {
        self.parts.par_iter().with_min_len(1024).map(Rectangle::on_device).collect()
    }

    /// The error of the factor with this number in the block, which could not be written.
    #[cfg(feature = "cuda")]
    pub(crate) fn error_of(&self, factor: usize) -> AdapterError {
        let factor = &self.parts[factor];
        let error = match self.dtype {
            DType::BF16 => factor.error::<bf16>(),
            DType::F16 => factor.error::<f16>(),
            DType::F32 => factor.error::<f32>(),
        };
        error.unwrap_or_else(|| factor.changing())
    }

    /// Writes the block as [`write_to`](Self::write_to) does, and calls `written` with the offset and the bytes of each
    /// consecutive part of whole factors, of some `part_bytes` bytes, on the thread that has written it.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "the CPU copies nothing"))]
    pub(crate) fn write_in_parts(
        &self,
        block: &mut [u8],
        part_bytes: usize,
        written: impl Fn(usize, &[u8]) -> Result<(), LoadError> + Sync,
    ) -> Result<(), LoadError> {
        assert_eq!(block.len(), self.bytes(), "the block must have the image's size");
        // No part ends between factors that are written together.
        let between = || self.parts.iter().enumerate().filter_map(|(at, source)| Some((source.between()?, at)));
        let last_between: HashMap<_, _> = between().collect();
        let mut ends = between().map(|(place, at)| (at, last_between[&place])).peekable();
        let (mut parts, mut rest, mut first, mut offset, mut bytes, mut end) = (Vec::new(), block, 0, 0, 0, 0);
        for (last, source) in self.parts.iter().enumerate() {
            bytes += source.block_elems() * self.dtype.bytes();
            end = ends.next_if(|(at, _)| *at == last).map_or(end, |(_, last)| end.max(last));
            if bytes >= part_bytes && last >= end || last + 1 == self.parts.len() {
                let part;
                (part, rest) = rest.split_at_mut(mem::take(&mut bytes));
                offset += part.len();
                parts.push((offset - part.len(), &self.parts[first..=last], part));
                first = last + 1;
            }
        }
        let write = |(offset, sources, part): (usize, &[Rectangle<'_>], &mut [u8])| {
            write_parts(self.dtype, sources, part)?;
            written(offset, part)
        };
        let error = parts.into_par_iter().find_map_first(|part| write(part).err());
        error.map_or(Ok(()), Err)
    }

    /// Splits the block into consecutive pieces of at most `max_bytes` bytes, so that it can be copied to a device
    /// without ever being whole on the host.
    ///
    /// ```
    /// # use aril::adapter::{AdapterError, MIN_STAGING_BYTES, SlotImage};
    /// # fn pack(image: &SlotImage<'_>, block: &mut [u8]) -> Result<(), AdapterError> {
    /// for piece in image.pieces(MIN_STAGING_BYTES) {
    ///     piece.write_to(&mut block[piece.range()])?;
    ///     println!("{} of {} bytes", piece.range().end, image.bytes());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// If `max_bytes < MIN_STAGING_BYTES`.
    pub fn pieces(&self, max_bytes: usize) -> impl Iterator<Item = Piece<'a>> {
        assert!(max_bytes >= MIN_STAGING_BYTES, "a piece takes up to MIN_STAGING_BYTES");
        let dtype = self.dtype;
        let room = max_bytes / dtype.bytes();
        let mut parts = self.parts.iter().flat_map(move |part| part.split(room)).peekable();
        let mut offset = 0;
        std::iter::from_fn(move || {
            let mut piece = vec![parts.next()?];
            let mut elems = piece[0].block_elems();
            while let Some(part) = parts.next_if(|next| elems + next.block_elems() <= room) {
                elems += part.block_elems();
                piece.push(part);
            }
            let begin = offset;
            offset += elems * dtype.bytes();
            Some(Piece { dtype, range: begin..offset, parts: piece })
        })
    }
}

/// A contiguous part of an image's block.
#[derive(Debug)]
pub struct Piece<'a> {
    dtype: DType,
    range: Range<usize>,
    parts: Vec<Rectangle<'a>>,
}

impl Piece<'_> {
    /// Byte range of the piece in the block.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Writes the piece, as [`SlotImage::write_to`] does.
    ///
    /// # Errors
    /// As for `write_to`.
    ///
    /// # Panics
    /// If `bytes.len() != self.range().len()`.
    pub fn write_to(&self, bytes: &mut [u8]) -> Result<(), AdapterError> {
        assert_eq!(bytes.len(), self.range.len(), "the memory must have the piece's size");
        let _writing = Writing::begin();
        write_parts(self.dtype, &self.parts, bytes)
    }
}

fn write_parts(dtype: DType, parts: &[Rectangle<'_>], block: &mut [u8]) -> Result<(), AdapterError> {
    match dtype {
        DType::BF16 => write::<bf16>(parts, block),
        DType::F16 => write::<f16>(parts, block),
        DType::F32 => write::<f32>(parts, block),
    }
}

/// Writes consecutive parts of a block, in parallel.
fn write<T: Element>(sources: &[Rectangle<'_>], mut block: &mut [u8]) -> Result<(), AdapterError> {
    let (mut groups, mut places) = (Vec::<Vec<Part<'_, '_>>>::with_capacity(sources.len()), HashMap::new());
    let mut group_of = Vec::with_capacity(sources.len());
    for source in sources {
        let part;
        (part, block) = block.split_at_mut(source.block_elems() * size_of::<T>());
        let group = source.between().map_or(groups.len(), |place| *places.entry(place).or_insert(groups.len()));
        match groups.get_mut(group) {
            Some(parts) => parts.push((source, part)),
            None => groups.push(vec![(source, part)]),
        }
        group_of.push(group);
    }
    let failure = |(group, parts)| Some((group, Rectangle::write::<T>(parts).err()?));
    let is_nested = is_nested();
    let failures: BTreeMap<_, _> = if is_nested {
        groups.into_iter().enumerate().filter_map(failure).collect()
    } else {
        groups.into_par_iter().enumerate().filter_map(failure).collect()
    };
    // The error of the first factor, whichever thread has found one first, with the place of a weight that is still
    // there.
    let failed = sources.iter().zip(group_of).filter(|(_, group)| failures.contains_key(group));
    let failed: Vec<_> = failed.map(|(source, _)| source).collect();
    let error = if is_nested {
        failed.into_iter().find_map(Rectangle::error::<T>)
    } else {
        failed.into_par_iter().find_map_first(Rectangle::error::<T>)
    };
    error.or(failures.into_values().next()).map_or(Ok(()), Err)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
        time::Duration,
    };

    use rayon::ThreadPoolBuilder;

    use super::*;
    use crate::{
        adapter::{Adapter, Tensor, nested::WRITING},
        model::{Linear, ModelSpec, Parallel, TpRank},
    };

    /// Bytes that take a while to read, so that threads wait for each other.
    struct Slow(Vec<u8>);

    impl AsRef<[u8]> for Slow {
        fn as_ref(&self) -> &[u8] {
            thread::sleep(Duration::from_micros(20));
            &self.0
        }
    }

    /// Loads on rayon's threads take up each other, but a thread is within two of them at most. What they write is
    /// right.
    #[test]
    fn loads_do_not_nest_without_bound() {
        const LAYERS: usize = 16;
        const FEATURES: usize = 64;
        let mut spec = ModelSpec::new();
        for layer in 0..LAYERS {
            let linear = Linear::new(format!("layers.{layer}"), Parallel::Replicated, FEATURES);
            spec.linear(linear.slice("m", FEATURES)).unwrap();
        }
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let tensors = (0..LAYERS).flat_map(|layer| {
            [("A", [8, FEATURES]), ("B", [FEATURES, 8])].map(|(factor, shape)| {
                let values: Vec<f32> = (0..=u8::MAX).cycle().take(shape[0] * shape[1]).map(f32::from).collect();
                let values = Slow(bytemuck::cast_slice(&values).to_vec());
                let name = format!("layers.{layer}.m.lora_{factor}.weight");
                (name, Tensor::new(DType::F32, shape, values).unwrap())
            })
        });
        let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 8}"#, tensors).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        let mut want = vec![0; image.bytes()];
        image.write_to(&mut want).unwrap();
        let most = AtomicUsize::new(0);
        let load = |_: usize| {
            let mut block = vec![0xee; image.bytes()];
            for piece in image.pieces(MIN_STAGING_BYTES) {
                most.fetch_max(WRITING.get() + 1, Ordering::Relaxed);
                piece.write_to(&mut block[piece.range()]).unwrap();
            }
            assert!(block == want);
        };
        for threads in [2, 4, 16] {
            let threads = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            threads.install(|| (0..64).into_par_iter().with_max_len(1).for_each(load));
        }
        assert_eq!(WRITING.get(), 0);
        assert!((1..=2).contains(&most.into_inner()));
    }
}
