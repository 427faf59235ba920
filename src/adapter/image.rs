//! The bytes an adapter takes in a slot: one block of exactly its own size, the same on the host and on the device.
//!
//! The factors stand one after the other, each laid out as [`layout`](super::layout) says, from a boundary of
//! [`ALIGNMENT_BYTES`](super::layout::ALIGNMENT_BYTES) on.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use super::{error::AdapterError, layout::LANE_FEATURES, rectangle::Rectangle};
use crate::{
    DType, Element,
    model::{MAX_RANK, Model},
};

/// The least that [`SlotImage::pieces`] can be limited to.
pub const MIN_STAGING_BYTES: usize = MAX_RANK * LANE_FEATURES * size_of::<f32>();

/// What an adapter takes in a slot, on one tensor-parallel rank: planned, checked, but not copied yet.
#[derive(Debug)]
pub struct SlotImage<'a> {
    dtype: DType,
    model: Model,
    entries: Vec<ImageEntry>,
    shared: Vec<SharedEntry>,
    /// The factors, one after the other.
    parts: Vec<Rectangle<'a>>,
    elems: usize,
}

/// One module of an adapter in its block.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ImageEntry {
    /// The module's descriptor-table entry.
    pub entry: usize,
    /// Where its A begins, in elements.
    pub a_elems: usize,
    /// Where its B begins, in elements.
    pub b_elems: usize,
    /// Its rank, at least 1.
    pub rank: usize,
    /// Its α/r or α/√r.
    pub scaling: f32,
}

/// What all experts of a layer have in common of a module.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SharedEntry {
    /// The descriptor-table entry ([`ProjectionSite::shared_entry`](crate::model::ProjectionSite::shared_entry) and those after it).
    pub entry: usize,
    /// Where their A begins, in elements, if it is the same.
    pub a_elems: Option<usize>,
    /// Where their B begins, in elements, if it is the same.
    pub b_elems: Option<usize>,
    /// Their rank, at least 1.
    pub rank: usize,
}

impl<'a> SlotImage<'a> {
    /// An image without modules.
    pub(super) fn new(dtype: DType, model: &Model) -> Self {
        Self { dtype, model: model.clone(), entries: Vec::new(), shared: Vec::new(), parts: Vec::new(), elems: 0 }
    }

    /// Appends a factor to the block and says where it begins, in elements.
    pub(super) fn place(&mut self, source: Rectangle<'a>) -> usize {
        let elems = self.elems;
        self.elems += source.block_elems();
        self.parts.push(source);
        elems
    }

    /// Adds a module whose factors were placed at `a_elems` and `b_elems`. Modules may share a factor.
    pub(super) fn push(&mut self, entry: usize, rank: usize, scaling: f32, a_elems: usize, b_elems: usize) {
        self.entries.push(ImageEntry { entry, a_elems, b_elems, rank, scaling });
    }

    /// Says what all experts share of a module, which was placed there. Their own entries are complete without it.
    pub(super) fn share(&mut self, entry: usize, rank: usize, a_elems: Option<usize>, b_elems: Option<usize>) {
        self.shared.push(SharedEntry { entry, a_elems, b_elems, rank });
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The element type of the block.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Entries a slot of the model has, whether this adapter has them or not.
    pub fn num_entries(&self) -> usize {
        self.model.num_entries()
    }

    /// The modules, each with a different entry.
    pub fn entries(&self) -> &[ImageEntry] {
        &self.entries
    }

    /// What experts share, each with an entry that no module has.
    pub fn shared(&self) -> &[SharedEntry] {
        &self.shared
    }

    /// The largest rank of any module.
    pub fn max_rank(&self) -> usize {
        self.entries.iter().map(|entry| entry.rank).max().unwrap_or(0)
    }

    /// The size of the block.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// Writes the block, laid out as [`layout`](super::layout) says, converting to its element type (rounded to nearest, ties to
    /// even), on rayon's threads.
    ///
    /// # Errors
    /// If a weight is NaN or infinite, or becomes infinite in the block's type.
    ///
    /// # Panics
    /// If `block` is not [`bytes`](Self::bytes) long.
    pub fn write_to(&self, block: &mut [u8]) -> Result<(), AdapterError> {
        assert_eq!(block.len(), self.bytes(), "the block must have the image's size");
        write_parts(self.dtype, &self.parts, block)
    }

    /// The block in pieces of at most `max_bytes`, one behind the other: for blocks that are to go elsewhere, such as to a device, and
    /// of which the host need not hold the whole.
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
    /// If `max_bytes` is below [`MIN_STAGING_BYTES`].
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

/// A part of an image's block.
#[derive(Debug)]
pub struct Piece<'a> {
    dtype: DType,
    range: Range<usize>,
    parts: Vec<Rectangle<'a>>,
}

impl Piece<'_> {
    /// Where it is in the block, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Writes it as [`SlotImage::write_to`] does.
    ///
    /// # Errors
    /// As for `write_to`.
    ///
    /// # Panics
    /// If `bytes` is not as long as its [`range`](Self::range).
    pub fn write_to(&self, bytes: &mut [u8]) -> Result<(), AdapterError> {
        assert_eq!(bytes.len(), self.range.len(), "the memory must have the piece's size");
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

/// Writes parts of a block that stand one after the other.
fn write<T: Element>(sources: &[Rectangle<'_>], mut block: &mut [u8]) -> Result<(), AdapterError> {
    let mut parts = Vec::with_capacity(sources.len());
    for source in sources {
        let part;
        (part, block) = block.split_at_mut(source.block_elems() * size_of::<T>());
        parts.push((source, part));
    }
    let error = parts.into_par_iter().find_map_first(|(source, part)| source.write::<T>(part).err());
    error.map_or(Ok(()), Err)
}
