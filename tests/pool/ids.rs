//! What an engine keeps of an adapter's id: the number, the namespace of its prefix cache, and the text of its logs.

use std::collections::BTreeSet;

use aril::pool::CacheNamespace;

use crate::setup::Setup;

#[test]
fn ids_and_namespaces_are_told_apart_by_their_numbers() {
    let mut setup = Setup::new(1, 1);
    let ids = [1.0, 2.0, 2.0].map(|value| setup.adding(value));
    let numbers: BTreeSet<u64> = ids.iter().map(|id| id.get()).collect();
    assert_eq!(numbers.len(), ids.len());
    let namespaces = ids.iter().map(|id| id.cache_namespace()).chain([CacheNamespace::BASE]);
    let namespaces = namespaces.flat_map(|namespace| [namespace, namespace.invoked_at(3), namespace.invoked_at(4)]);
    let keys: BTreeSet<[u64; 2]> = namespaces.clone().map(CacheNamespace::get).collect();
    assert_eq!(keys.len(), 3 * ids.len() + 1, "no version shares a prefix with another one, or with the base model");
    let versions: BTreeSet<_> = namespaces.map(CacheNamespace::version).collect();
    assert_eq!(versions, ids.into_iter().map(Some).chain([None]).collect());
    assert_eq!(ids[0].to_string(), format!("adapter {}", ids[0].get()));
    setup.finish();
}
