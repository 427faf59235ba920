//! Fewer and smaller cases, for tools under which kernels are a hundred times slower (compute-sanitizer): every kernel
//! runs, on a few blocks.

use std::{env, sync::OnceLock};

/// Random cases of a property.
const RANDOM_CASES: u32 = 4;

/// Whether `ARIL_SMALL_CASES` is 1.
fn is_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| match env::var("ARIL_SMALL_CASES") {
        Ok(value) => match value.as_str() {
            "0" => false,
            "1" => true,
            _ => panic!("ARIL_SMALL_CASES is 0 or 1, not {value}"),
        },
        Err(_) => false,
    })
}

/// `all` of a test's sizes, or these `few`.
pub fn choose<T>(all: T, few: T) -> T {
    if is_wanted() { few } else { all }
}

/// This many random cases, or `ARIL_MORE_CASES` times as many.
pub fn more_cases(cases: u32) -> u32 {
    cases * env::var("ARIL_MORE_CASES").map_or(1, |times| times.parse().expect("ARIL_MORE_CASES is a number"))
}

/// `PROPTEST_CASES`, or this many random cases, or few.
pub fn random_cases(wanted: u32) -> u32 {
    env::var("PROPTEST_CASES")
        .map_or_else(|_| choose(wanted, RANDOM_CASES), |cases| cases.parse().expect("PROPTEST_CASES is a number"))
}
