//! Errors of operations and weight tables on either backend.
//!
//! [`AdapterError`](crate::adapter::AdapterError), [`PlanError`](crate::plan::PlanError) and [`SpecError`](crate::model::SpecError)
//! are in the modules that return them.
//!
//! A message is whole: it has the text of its cause, which the fields of the variant hold. So [`source`](std::error::Error::source)
//! returns `None`, and a report of the chain shows no text twice.

#[cfg(feature = "cuda")]
mod launch;
mod load;
mod operand;

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use self::launch::LaunchError;
pub use self::{
    load::{LoadError, SlotError},
    operand::OperandError,
};
