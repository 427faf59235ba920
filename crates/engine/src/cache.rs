//! The paged KV cache: which blocks each sequence has, and which full blocks later sequences may share. Each sequence
//! also has a place for its state in gated delta nets, which is of all its tokens, so that models with such layers share
//! no blocks.
//!
//! Only bookkeeping: the keys and values are in the model's session, block `b` in the rows from `b · block_rows` on, and
//! so are the states.
//!
//! Invariants: a block that a sequence holds is written by that sequence alone, unless it is full and published, when
//! nobody writes it. A published block is found by its [`CacheNamespace`], all blocks before it and its own tokens,
//! compared exactly: no hash stands for them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use aril::pool::{AdapterId, CacheNamespace};

/// The blocks of a cache.
#[derive(Debug)]
pub(crate) struct KvCache {
    block_rows: usize,
    is_sharing: bool,
    blocks: Vec<Block>,
    /// Blocks that no sequence holds, in the order in which they are taken: first those that hold nothing, then the
    /// ones released first.
    free: BTreeSet<(u64, u32)>,
    /// Places for states that no sequence has.
    free_states: Vec<u32>,
    published: HashMap<Arc<Key>, u32>,
    last_release: u64,
    last_serial: u64,
    counters: Counters,
}

/// What prefix sharing has saved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counters {
    /// Tokens of sequences that were started.
    pub queried_tokens: u64,
    /// Those of them that were found in the cache.
    pub shared_tokens: u64,
}

#[derive(Debug, Default)]
struct Block {
    /// Sequences that hold it.
    holders: u32,
    /// When its last holder released it; 0 if it holds nothing.
    released: u64,
    /// Its content, if it is published.
    content: Option<Content>,
}

#[derive(Clone, Debug)]
struct Content {
    key: Arc<Key>,
    /// Identifies this content among all that were ever published.
    serial: u64,
}

/// The tokens of a full block, and what is before them.
#[derive(Debug, Eq, Hash, PartialEq)]
struct Key {
    namespace: CacheNamespace,
    /// The serial number of the published block before it; 0 if it begins a sequence.
    before: u64,
    tokens: Box<[u32]>,
}

/// The blocks of one sequence.
#[derive(Debug)]
#[must_use = "its blocks are lost unless it is released"]
pub(crate) struct Chain {
    /// Of the sequence.
    namespace: CacheNamespace,
    state: u32,
    blocks: Vec<u32>,
    /// Its blocks that have been published, or were found published.
    num_published: usize,
    /// The serial number of the last of these, or 0.
    before: u64,
}

impl Chain {
    /// The blocks in the order of the sequence.
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The place of its state.
    pub(crate) fn state(&self) -> u32 {
        self.state
    }
}

impl KvCache {
    /// A cache of `num_blocks` blocks of `block_rows` tokens each, for up to `sequences` sequences at a time.
    /// `is_sharing` turns prefix sharing on.
    pub(crate) fn new(num_blocks: u32, block_rows: usize, sequences: usize, is_sharing: bool) -> Self {
        Self {
            block_rows,
            is_sharing,
            blocks: (0..num_blocks).map(|_| Block::default()).collect(),
            free: (0..num_blocks).map(|block| (0, block)).collect(),
            free_states: (0..).take(sequences).collect(),
            published: HashMap::new(),
            last_release: 0,
            last_serial: 0,
            counters: Counters::default(),
        }
    }

    pub(crate) fn block_rows(&self) -> usize {
        self.block_rows
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that no sequence holds.
    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    /// Starts a sequence with the published blocks that hold its first tokens. Returns it, and how many tokens they
    /// hold: fewer than all, so that at least one is computed.
    pub(crate) fn start(&mut self, namespace: CacheNamespace, tokens: &[u32]) -> (Chain, usize) {
        let state = self.free_states.pop().expect("no more sequences run than there are states");
        let mut chain = Chain { namespace, state, blocks: Vec::new(), num_published: 0, before: 0 };
        let shareable = if self.is_sharing { &tokens[..tokens.len().saturating_sub(1)] } else { &[] };
        for tokens in shareable.chunks_exact(self.block_rows) {
            let key = self.next_key(&chain, tokens);
            let Some(&block) = self.published.get(&key) else { break };
            self.hold(block);
            chain.before = self.before(block);
            chain.blocks.push(block);
            chain.num_published += 1;
        }
        let shared = chain.blocks.len() * self.block_rows;
        self.counters.queried_tokens += tokens.len() as u64;
        self.counters.shared_tokens += shared as u64;
        (chain, shared)
    }

    /// Gives a sequence the blocks for `num_tokens` tokens in all. Returns `false`, and changes nothing, if there are
    /// too few.
    pub(crate) fn grow(&mut self, chain: &mut Chain, num_tokens: usize) -> bool {
        let missing = num_tokens.div_ceil(self.block_rows).saturating_sub(chain.blocks.len());
        if missing > self.free.len() {
            return false;
        }
        for (_, block) in self.free.iter().take(missing).copied().collect::<Vec<_>>() {
            self.unpublish(block);
            self.hold(block);
            chain.blocks.push(block);
        }
        true
    }

    /// Publishes the full blocks of a sequence whose first tokens, these, have been computed.
    pub(crate) fn publish(&mut self, chain: &mut Chain, computed: &[u32]) {
        if !self.is_sharing {
            return;
        }
        for tokens in computed.chunks_exact(self.block_rows).skip(chain.num_published) {
            let key = Arc::new(self.next_key(chain, tokens));
            let block = chain.blocks[chain.num_published];
            // Another sequence may have published the same tokens first. This block then stays the sequence's own.
            let published = *self.published.entry(Arc::clone(&key)).or_insert(block);
            if published == block {
                self.last_serial += 1;
                self.blocks[block as usize].content = Some(Content { key, serial: self.last_serial });
            }
            chain.before = self.before(published);
            chain.num_published += 1;
        }
    }

    /// Ends a sequence. Its published blocks can be shared until they are taken for others.
    pub(crate) fn release(&mut self, chain: Chain) {
        self.free_states.push(chain.state);
        // The last block first: a block is never taken before those that follow it.
        for id in chain.blocks.into_iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.holders -= 1;
            if block.holders > 0 {
                continue;
            }
            if block.content.is_some() {
                self.last_release += 1;
                block.released = self.last_release;
            }
            self.free.insert((block.released, id));
        }
    }

    /// Withdraws all published blocks of a version.
    pub(crate) fn forget(&mut self, version: AdapterId) {
        for id in (0..).take(self.blocks.len()) {
            let block = &self.blocks[id as usize];
            if block.content.as_ref().is_none_or(|content| content.key.namespace.version() != Some(version)) {
                continue;
            }
            let was_free = self.free.remove(&(block.released, id));
            self.unpublish(id);
            self.blocks[id as usize].released = 0;
            if was_free {
                self.free.insert((0, id));
            }
        }
    }

    /// Published blocks of a version, or of the base model.
    #[cfg(test)]
    pub(crate) fn num_published(&self, version: Option<AdapterId>) -> usize {
        let contents = self.blocks.iter().filter_map(|block| block.content.as_ref());
        contents.filter(|content| content.key.namespace.version() == version).count()
    }

    /// The key of a sequence's first block that is not published, with these tokens.
    fn next_key(&self, chain: &Chain, tokens: &[u32]) -> Key {
        let end = (chain.num_published + 1) * self.block_rows;
        Key { namespace: chain.namespace.of_block(end), before: chain.before, tokens: tokens.into() }
    }

    fn hold(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        if block.holders == 0 {
            self.free.remove(&(block.released, id));
        }
        block.released = 0;
        block.holders += 1;
    }

    fn unpublish(&mut self, id: u32) {
        if let Some(content) = self.blocks[id as usize].content.take() {
            self.published.remove(&content.key);
        }
    }

    /// What the block after this published one has before it.
    fn before(&self, id: u32) -> u64 {
        self.blocks[id as usize].content.as_ref().expect("the block is published").serial
    }
}
