//! Digests, by which the ranks of a group find out whether they have the same.

/// The digest of what has this digest, followed by a word.
pub(crate) fn mix(digest: u64, word: u64) -> u64 {
    let [low, high]: [u64; 2] = bytemuck::cast(u128::from(digest ^ word) * 0x9e37_79b9_7f4a_7c15);
    low ^ high
}

/// The digest of bytes: the same on all machines.
pub(crate) fn of_bytes(bytes: &[u8]) -> u64 {
    // Four chains, of which none waits for another.
    let mut chains = [1, 2, 3, 4];
    let (chunks, rest) = bytes.as_chunks::<32>();
    let mut mix_in = |chunk: &[u8; 32]| {
        for (chain, word) in chains.iter_mut().zip(chunk.as_chunks().0) {
            *chain = mix(*chain, u64::from_le_bytes(*word));
        }
    };
    chunks.iter().for_each(&mut mix_in);
    let mut last = [0; 32];
    last[..rest.len()].copy_from_slice(rest);
    mix_in(&last);
    chains.into_iter().fold(bytes.len() as u64, mix)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Each bit and each length counts.
    #[test]
    fn bytes_that_differ_have_other_digests() {
        let mut seen = HashMap::new();
        let mut check = |bytes: &[u8]| {
            let other = seen.insert(of_bytes(bytes), bytes.to_vec());
            assert!(other.is_none_or(|other| other == bytes));
        };
        for len in 0..=100 {
            let mut bytes: Vec<u8> = (0..len).collect();
            check(&bytes);
            for bit in 0..8 * bytes.len() {
                bytes[bit / 8] ^= 1 << (bit % 8);
                check(&bytes);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            check(&[&bytes[..], &[0]].concat());
        }
    }
}
