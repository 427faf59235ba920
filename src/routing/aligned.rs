use std::num::NonZeroUsize;

use super::{Batch, Slot, TopK};
use crate::error::OperandError;

/// The routes of a step in blocks of one slot and one expert, for engines that apply adapters with their own grouped GEMM.
/// `cuda::Alignment` computes the same on the device.
///
/// Blocks are sorted by expert, then by slot; routes within them by number. The last block of each pair of slot and expert is
/// padded with `tokens * top_k`, one past the last route. Routes whose token has no slot, and routes that are not [local](TopK),
/// are omitted.
///
/// The GEMM finds a block's factors by one index: [`block_experts`](Self::block_experts) for per-expert factors, stored as
/// `[num_slots * num_experts, ..]`, and [`block_slots`](Self::block_slots) for shared factors, stored as `[num_slots, ..]`. The row
/// of `x` is `route / top_k` for gate-up and `route` for down.
///
/// ```
/// use aril::{Slot, routing::{AlignedRoutes, Batch, TopK}};
///
/// // Three tokens with two of four experts each. The second token has no adapter.
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
    /// Aligns the routes of `batch` to `num_experts` local experts into blocks of `block_size` routes. Tokens with a slot at or
    /// above `num_slots` count as base tokens.
    ///
    /// # Errors
    /// [`OperandError::Tokens`] if `top_k` and `batch` differ in their number of tokens.
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

    /// Route numbers of all blocks, including padding: `[blocks * block_size]`.
    #[doc(alias = "sorted_token_ids")]
    pub fn routes(&self) -> &[usize] {
        &self.routes
    }

    /// `slot * num_experts + expert` of each block: `[blocks]`.
    #[doc(alias = "expert_ids")]
    pub fn block_experts(&self) -> &[usize] {
        &self.block_experts
    }

    /// The slot of each block: `[blocks]`.
    pub fn block_slots(&self) -> &[Slot] {
        &self.block_slots
    }
}
