use std::num::NonZeroUsize;

use super::{Batch, Slot, TopK};
use crate::error::OperandError;

/// The routes of a step that have a slot, in blocks of one slot and one expert each: for an engine that runs adapters as experts
/// through a grouped GEMM of its own. `cuda::Alignment` makes the same on the device.
///
/// Blocks stand by expert and slot, and the routes within by number; what these leave of the last block of a slot and expert is
/// padding, for which the number of all routes stands: one past the last. A route whose token has no slot, or that is not here, is in
/// no block.
///
/// A GEMM takes one index for the weights of a block. Where each expert has factors of its own, which stand as
/// `[num_slots * num_experts, ..]`, it is that of [`block_experts`](Self::block_experts); where all share one, `[num_slots, ..]`, that
/// of [`block_slots`](Self::block_slots). The row of `x` is the token's, `route / top_k`, in gate_up, and the route's in down.
///
/// ```
/// use aril::{Slot, routing::{AlignedRoutes, Batch, TopK}};
///
/// // Three tokens with two of four experts each, of which the second has no adapter.
/// let (slots, ids) = ([Slot::new(1), Slot::BASE, Slot::new(1)], [3, 0, 0, 3, 3, 2]);
/// let aligned = AlignedRoutes::new(&TopK::new(&ids, 2)?, &Batch::new(&slots), 4, 2, 2.try_into()?)?;
/// assert_eq!(aligned.routes(), [1, 6, 5, 6, 0, 4]);
/// assert_eq!(aligned.block_experts(), [4, 4 + 2, 4 + 3]);
/// assert_eq!(aligned.block_slots(), [Slot::new(1); 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[doc(alias = "moe_align_block_size")]
pub struct AlignedRoutes {
    routes: Vec<usize>,
    block_experts: Vec<usize>,
    block_slots: Vec<Slot>,
}

impl AlignedRoutes {
    /// Puts the routes of `batch` to `num_experts` local experts in blocks of `block_size`. Slots at or above `num_slots` count as base.
    ///
    /// # Errors
    /// If the router chose for other tokens than the batch has.
    pub fn new(
        top_k: &TopK<'_>,
        batch: &Batch<'_>,
        num_experts: usize,
        num_slots: usize,
        block_size: NonZeroUsize,
    ) -> Result<Self, OperandError> {
        top_k.check_tokens(batch.num_tokens())?;
        let place = |route: usize| {
            let slot = batch.slots()[route / top_k.top_k()];
            let index = slot.index().filter(|&index| index < num_slots)?;
            top_k.row(route)?;
            Some((top_k.expert(route, num_experts)?, index, slot, route))
        };
        let mut places: Vec<_> = (0..top_k.num_routes()).filter_map(place).collect();
        places.sort_unstable();
        let mut aligned = Self::default();
        for group in places.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            for block in group.chunks(block_size.get()) {
                let (expert, index, slot, _) = block[0];
                aligned.block_experts.push(index * num_experts + expert);
                aligned.block_slots.push(slot);
                aligned.routes.extend(block.iter().map(|&(.., route)| route));
                aligned.routes.resize(aligned.block_slots.len() * block_size.get(), top_k.num_routes());
            }
        }
        Ok(aligned)
    }

    /// The routes of each block, one block after the other.
    #[doc(alias = "sorted_token_ids")]
    pub fn routes(&self) -> &[usize] {
        &self.routes
    }

    /// Each block's `slot * num_experts + expert`.
    #[doc(alias = "expert_ids")]
    pub fn block_experts(&self) -> &[usize] {
        &self.block_experts
    }

    /// Each block's slot.
    pub fn block_slots(&self) -> &[Slot] {
        &self.block_slots
    }
}
