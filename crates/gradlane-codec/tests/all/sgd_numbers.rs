//! SGD fused with the mean: numbers by hand, and a table from torch.

use std::num::NonZeroU32;

use gradlane_codec::{
    reduce_sgd_slices, FloatDtype, InstructionSet, Mean, SgdOptions, SgdSlices, SgdStep,
};

fn mean(dtype: FloatDtype, divisor: u32) -> Mean {
    Mean::of_all(dtype, NonZeroU32::new(divisor).unwrap())
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn bits_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|one| u32::from_ne_bytes(one.try_into().unwrap())).collect()
}

/// Steps f32 parameters through gradients, each repeated `repeat` times to reach body and tail.
fn train(
    instruction_set: InstructionSet,
    options: SgdOptions,
    parameters: &[f32],
    gradients: &[&[f32]],
    repeat: usize,
) -> (Vec<u8>, Vec<u8>) {
    let mut parameters = f32_bytes(&parameters.repeat(repeat));
    let mut momentum = f32_bytes(&vec![f32::NAN; parameters.len() / 4]);
    for (index, gradient) in gradients.iter().enumerate() {
        let mut output = vec![0; parameters.len()];
        let memory = SgdSlices {
            parameters: &parameters,
            momentum_buffer: Some(&mut momentum),
            output: &mut output,
            copy_to: None,
        };
        let step = SgdStep { options, first: index == 0 };
        let gradient = f32_bytes(&gradient.repeat(repeat));
        reduce_sgd_slices(instruction_set, mean(FloatDtype::F32, 1), step, &[&gradient], memory)
            .unwrap();
        parameters = output;
    }
    (parameters, momentum)
}

#[test]
fn numbers_by_hand() {
    // Powers of two keep every operation exact, so that each number can be done on paper.
    // Ranks give 3 and 1: g = 2. With weight decay 0.5 and p = 8: g = 2 + 4 = 6.
    // First step: b = 6. Nesterov: g = 6 + 0.5 * 6 = 9. p = 8 - 0.25 * 9 = 5.75.
    // Second step, ranks 1 and 1: g = 1 + 0.5 * 5.75 = 3.875; b = 0.5 * 6 + 3.875 = 6.875;
    // g = 3.875 + 0.5 * 6.875 = 7.3125; p = 5.75 - 0.25 * 7.3125 = 3.921875.
    let options = SgdOptions {
        momentum: 0.5,
        weight_decay: 0.5,
        nesterov: true,
        ..SgdOptions::with_lr(0.25)
    };
    let count = 37;
    for instruction_set in InstructionSet::available() {
        let mut parameters = f32_bytes(&vec![8.0; count]);
        let mut momentum = vec![0xff; 4 * count];
        let rounds = [(3.0, 1.0, 5.75, 6.0), (1.0, 1.0, 3.921_875, 6.875)];
        for (index, (rank_0, rank_1, parameter, velocity)) in rounds.into_iter().enumerate() {
            let inputs = [f32_bytes(&vec![rank_0; count]), f32_bytes(&vec![rank_1; count])];
            let mut output = vec![0; 4 * count];
            let mut second = vec![0; 4 * count];
            let memory = SgdSlices {
                parameters: &parameters,
                momentum_buffer: Some(&mut momentum),
                output: &mut output,
                copy_to: Some(&mut second),
            };
            let step = SgdStep { options, first: index == 0 };
            let both = [inputs[0].as_slice(), inputs[1].as_slice()];
            reduce_sgd_slices(instruction_set, mean(FloatDtype::F32, 2), step, &both, memory)
                .unwrap();
            assert_eq!(output, f32_bytes(&vec![parameter; count]), "{instruction_set}");
            assert_eq!(momentum, f32_bytes(&vec![velocity; count]), "{instruction_set}");
            assert_eq!(second, output, "{instruction_set}");
            parameters = output;
        }
    }
}

#[test]
fn dampening_and_maximize_by_hand() {
    // g = -4. First step: b = -4, undampened; p = 1 + 0.5 * 4 = 3.
    // Second: b = 0.5 * -4 + (1 - 0.75) * -4 = -3; p = 3 + 0.5 * 3 = 4.5.
    let options =
        SgdOptions { momentum: 0.5, dampening: 0.75, maximize: true, ..SgdOptions::with_lr(0.5) };
    for instruction_set in InstructionSet::available() {
        let (parameters, momentum) = train(instruction_set, options, &[1.0], &[&[4.0], &[4.0]], 21);
        assert_eq!(parameters, f32_bytes(&[4.5; 21]), "{instruction_set}");
        assert_eq!(momentum, f32_bytes(&[-3.0; 21]), "{instruction_set}");
    }
}

/// One row of the table: options, parameters and momentum after three steps.
type Row = (SgdOptions, [u32; 5], Option<[u32; 5]>);

const START: [u32; 5] = [0xbef9_3b54, 0xbf1a_940d, 0xbf0e_df65, 0x3f2a_e2df, 0xbe4a_272f];
const GRADIENTS: [[u32; 5]; 3] = [
    [0x3f15_34ae, 0xbed7_4d2b, 0xbe6a_41f0, 0x3e41_e8a5, 0xbe8a_1b6f],
    [0xbe2b_5aaa, 0x3e54_3056, 0x3d88_adb6, 0xbe4c_aa17, 0x3e52_5275],
    [0x3e30_5553, 0xbe33_0fc3, 0x3e6b_e962, 0x3c8c_4f99, 0xbeb6_b01d],
];

/// What `torch.optim.SGD(foreach=False)` of torch 2.15 gives with `ATEN_CPU_CAPABILITY=default`,
/// which is the setting in which torch's kernels use no fused multiply-add.
fn torch_table() -> [Row; 6] {
    let sgd = SgdOptions::with_lr;
    [
        (sgd(0.1), [0xbf0b_a932, 0xbf10_a435, 0xbf10_9f5a, 0x3f2a_b775, 0xbe1f_06b8], None),
        (
            SgdOptions { weight_decay: 1e-4, ..sgd(0.1) },
            [0xbf0b_a82d, 0xbf10_a310, 0xbf10_9e48, 0x3f2a_b628, 0xbe1f_0540],
            None,
        ),
        (
            SgdOptions { momentum: 0.9, weight_decay: 5e-4, ..sgd(0.05) },
            [0xbf0e_f31a, 0xbf0e_c58a, 0xbf0b_7d45, 0x3f28_ef70, 0xbe26_6919],
            Some([0x3efc_6a0a, 0xbea8_d8b0, 0x3dd5_d142, 0xbc0a_ce0e, 0xbec8_0a2a]),
        ),
        (
            SgdOptions { momentum: 0.9, dampening: 0.1, ..sgd(0.05) },
            [0xbf0f_2782, 0xbf0e_8343, 0xbf0b_0d4b, 0x3f28_7eb5, 0xbe26_4443],
            Some([0x3efb_aa38, 0xbea9_0910, 0x3d9b_da76, 0x3be2_553a, 0xbebf_1b01]),
        ),
        (
            SgdOptions { momentum: 0.9, nesterov: true, weight_decay: 1e-4, ..sgd(0.03) },
            [0xbf0b_0949, 0xbf11_3abd, 0xbf0d_93f0, 0x3f29_ca64, 0xbe29_ec92],
            Some([0x3efc_b319, 0xbea8_8582, 0x3dd7_084e, 0xbc16_8bfa, 0xbec7_ef9b]),
        ),
        (
            SgdOptions { momentum: 0.9, maximize: true, weight_decay: 0.01, ..sgd(0.05) },
            [0xbed3_dafa, 0xbf25_ebe6, 0xbf11_d497, 0x3f2c_54b4, 0xbe6d_47d1],
            Some([0xbf01_9296, 0x3e9f_d1c3, 0xbdf6_e098, 0x3ce2_2f79, 0x3ec5_0824]),
        ),
    ]
}

#[test]
fn three_steps_give_the_bits_of_torch_without_fused_operations() {
    let start = START.map(f32::from_bits);
    let gradients = GRADIENTS.map(|gradient| gradient.map(f32::from_bits));
    let gradients: Vec<&[f32]> = gradients.iter().map(<[f32; 5]>::as_slice).collect();
    let repeat = 31;
    for (options, parameters, momentum) in torch_table() {
        for instruction_set in InstructionSet::available() {
            let (found, velocity) = train(instruction_set, options, &start, &gradients, repeat);
            assert_eq!(bits_of(&found), parameters.repeat(repeat), "{instruction_set} {options:?}");
            if let Some(momentum) = momentum {
                assert_eq!(
                    bits_of(&velocity),
                    momentum.repeat(repeat),
                    "{instruction_set} {options:?}"
                );
            }
        }
    }
}
