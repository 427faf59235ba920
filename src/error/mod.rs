//! Errors of operations and weight tables on either backend.
//!
//! [`AdapterError`](crate::adapter::AdapterError), [`PlanError`](crate::plan::PlanError) and [`SpecError`](crate::model::SpecError)
//! are in the modules that return them.

#[cfg(feature = "cuda")]
mod launch;
mod load;
mod operand;
mod slot;

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use self::launch::LaunchError;
pub use self::{load::LoadError, operand::OperandError, slot::SlotError};
