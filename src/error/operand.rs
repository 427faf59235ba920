use crate::{DType, model::Activation};

/// An operand that does not fit. Nothing was computed or enqueued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// The experts have no gate, and the activation is none without.
    #[error("{activation:?} needs a gate, which the experts do not have")]
    Activation {
        /// The activation given.
        activation: Activation,
    },
    /// The bias of a layer has not one element for each output.
    #[error("`bias` has {got} elements, but the layer has {want} outputs")]
    Bias {
        /// Its length.
        got: usize,
        /// The layer's outputs, of all slices.
        want: usize,
    },
    /// An operand is of another element type than the table.
    #[error("`{operand}` is {got}, but the operation computes on {want}")]
    DType {
        /// Which operand.
        operand: &'static str,
        /// Its element type.
        got: DType,
        /// The operation's.
        want: DType,
    },
    /// The matrix reaches past the memory given for it.
    #[error(
        "`{operand}` of {rows} rows of {cols}, {row_stride} apart, does not fit in the {len} elements given for it"
    )]
    Extent {
        /// Which operand.
        operand: &'static str,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
        /// Elements of the memory.
        len: usize,
    },
    /// Two lengths that must agree do not.
    #[error("`{operand}` has {got} elements, but the batch has {want} tokens")]
    Length {
        /// Which operand.
        operand: &'static str,
        /// Its length.
        got: usize,
        /// The batch's tokens.
        want: usize,
    },
    /// The layer and the step's weights are of different models.
    #[error("the layer and the weights were made for different models or tensor-parallel ranks")]
    Model,
    /// The rows of the matrix overlap.
    #[error("`{operand}` has rows of {cols} elements only {row_stride} apart")]
    Overlap {
        /// Which operand.
        operand: &'static str,
        /// Columns.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
    },
    /// The router's choices do not say the same of each route.
    #[error("`{operand}` has {got} elements, but there are {want} routes")]
    Routes {
        /// Which operand.
        operand: &'static str,
        /// Its length.
        got: usize,
        /// Tokens times the experts that each has chosen.
        want: usize,
    },
    /// The matrix has another shape than the layer and the batch ask for.
    #[error("`{operand}` is [{rows}, {cols}], but must be [{want_rows}, {want_cols}]")]
    Shape {
        /// Which operand.
        operand: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// Rows it must have.
        want_rows: usize,
        /// Columns it must have.
        want_cols: usize,
    },
    /// The base weights of a layer are not one matrix for each slice.
    #[error("`W` is {got} matrices, but the layer has {want} slices")]
    Slices {
        /// The matrices given.
        got: usize,
        /// The layer's slices.
        want: usize,
    },
    /// The router chose for other tokens than the batch has.
    #[error("the router chose for {got} tokens, but the batch has {want}")]
    Tokens {
        /// Tokens of the choices.
        got: usize,
        /// Tokens of the batch.
        want: usize,
    },
    /// The router's choices are not of whole tokens.
    #[error("{ids} expert ids are not those of whole tokens with {top_k} each")]
    TopK {
        /// The ids given.
        ids: usize,
        /// How many a token has.
        top_k: usize,
    },
}
