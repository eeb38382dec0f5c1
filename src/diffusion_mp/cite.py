"""``cite``: the BibTeX of what a model uses."""

from __future__ import annotations

from torch import nn

from diffusion_mp.errors import check_kind

REFERENCES: dict[str, str] = {
    "wu2025transformers": """@article{wu2025transformers,
  title   = {Transformers from Diffusion: A Unified Framework for Neural Message Passing},
  author  = {Wu, Qitian and Wipf, David and Yan, Junchi},
  journal = {Journal of Machine Learning Research},
  year    = {2025}
}""",
    "wu2023difformer": """@inproceedings{wu2023difformer,
  title     = {{DIFFormer}: Scalable (Graph) Transformers Induced by Energy Constrained Diffusion},
  author    = {Wu, Qitian and Yang, Chenxiao and Zhao, Wentao and He, Yixuan and Wipf, David and Yan, Junchi},
  booktitle = {International Conference on Learning Representations},
  year      = {2023}
}""",
    "wu2023sgformer": """@inproceedings{wu2023sgformer,
  title     = {{SGFormer}: Simplifying and Empowering Transformers for Large-Graph Representations},
  author    = {Wu, Qitian and Zhao, Wentao and Yang, Chenxiao and Zhang, Hengrui and Nie, Fan and Jiang, Haitian and
               Bian, Yatao and Yan, Junchi},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023}
}""",
    "wu2022nodeformer": """@inproceedings{wu2022nodeformer,
  title     = {{NodeFormer}: A Scalable Graph Structure Learning Transformer for Node Classification},
  author    = {Wu, Qitian and Zhao, Wentao and Li, Zenan and Wipf, David and Yan, Junchi},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022}
}""",
    "sfiformer": """@misc{sfiformer,
  title  = {{SFi-Former}: Sparse Flow Induced Attention for Graph Transformer},
  author = {{Anonymous authors}},
  note   = {Paper under double-blind review}
}""",
    "zhangwhere": """@misc{zhangwhere,
  title  = {Where to Add {PDE} Diffusion in Transformers},
  author = {Zhang, Yukun and Zhou, Xueqing},
  note   = {Preprint}
}""",
    "bresson2017gatedgcn": """@misc{bresson2017gatedgcn,
  title         = {Residual Gated Graph {ConvNets}},
  author        = {Bresson, Xavier and Laurent, Thomas},
  year          = {2017},
  eprint        = {1711.07553},
  archivePrefix = {arXiv}
}""",
    "dwivedi2023benchmarking": """@article{dwivedi2023benchmarking,
  title   = {Benchmarking Graph Neural Networks},
  author  = {Dwivedi, Vijay Prakash and Joshi, Chaitanya K. and Luu, Anh Tuan and Laurent, Thomas and Bengio, Yoshua and
             Bresson, Xavier},
  journal = {Journal of Machine Learning Research},
  year    = {2023}
}""",
    "rampasek2022gps": """@inproceedings{rampasek2022gps,
  title     = {Recipe for a General, Powerful, Scalable Graph Transformer},
  author    = {Ramp{\\'a}{\\v{s}}ek, Ladislav and Galkin, Mikhail and Dwivedi, Vijay Prakash and Luu, Anh Tuan and
               Wolf, Guy and Beaini, Dominique},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022}
}""",
    "choromanski2021performer": """@inproceedings{choromanski2021performer,
  title     = {Rethinking Attention with Performers},
  author    = {Choromanski, Krzysztof and Likhosherstov, Valerii and Dohan, David and Song, Xingyou and Gane, Andreea
               and Sarlos, Tamas and Hawkins, Peter and Davis, Jared and Mohiuddin, Afroz and Kaiser, Lukasz and
               Belanger, David and Colwell, Lucy and Weller, Adrian},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}""",
    "kipf2017gcn": """@inproceedings{kipf2017gcn,
  title     = {Semi-Supervised Classification with Graph Convolutional Networks},
  author    = {Kipf, Thomas N. and Welling, Max},
  booktitle = {International Conference on Learning Representations},
  year      = {2017}
}""",
    "wu2019sgc": """@inproceedings{wu2019sgc,
  title     = {Simplifying Graph Convolutional Networks},
  author    = {Wu, Felix and Souza, Amauri and Zhang, Tianyi and Fifty, Christopher and Yu, Tao and Weinberger, Kilian},
  booktitle = {International Conference on Machine Learning},
  year      = {2019}
}""",
    "xu2019gin": """@inproceedings{xu2019gin,
  title     = {How Powerful are Graph Neural Networks?},
  author    = {Xu, Keyulu and Hu, Weihua and Leskovec, Jure and Jegelka, Stefanie},
  booktitle = {International Conference on Learning Representations},
  year      = {2019}
}""",
    "velickovic2018gat": """@inproceedings{velickovic2018gat,
  title     = {Graph Attention Networks},
  author    = {Veli{\\v{c}}kovi{\\'c}, Petar and Cucurull, Guillem and Casanova, Arantxa and Romero, Adriana and
               Li{\\`o}, Pietro and Bengio, Yoshua},
  booktitle = {International Conference on Learning Representations},
  year      = {2018}
}""",
    "klicpera2019appnp": """@inproceedings{klicpera2019appnp,
  title     = {Predict then Propagate: Graph Neural Networks meet Personalized {PageRank}},
  author    = {Klicpera, Johannes and Bojchevski, Aleksandar and G{\\"u}nnemann, Stephan},
  booktitle = {International Conference on Learning Representations},
  year      = {2019}
}""",
    "chen2020gcnii": """@inproceedings{chen2020gcnii,
  title     = {Simple and Deep Graph Convolutional Networks},
  author    = {Chen, Ming and Wei, Zhewei and Huang, Zengfeng and Ding, Bolin and Li, Yaliang},
  booktitle = {International Conference on Machine Learning},
  year      = {2020}
}""",
    "lim2023signnet": """@inproceedings{lim2023signnet,
  title     = {Sign and Basis Invariant Networks for Spectral Graph Representation Learning},
  author    = {Lim, Derek and Robinson, Joshua and Zhao, Lingxiao and Smidt, Tess and Sra, Suvrit and Maron, Haggai and
               Jegelka, Stefanie},
  booktitle = {International Conference on Learning Representations},
  year      = {2023}
}""",
    "vaswani2017attention": """@inproceedings{vaswani2017attention,
  title     = {Attention is All you Need},
  author    = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and
               Gomez, Aidan N. and Kaiser, {\\L}ukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2017}
}""",
    "tay2021lra": """@inproceedings{tay2021lra,
  title     = {Long Range Arena: A Benchmark for Efficient Transformers},
  author    = {Tay, Yi and Dehghani, Mostafa and Abnar, Samira and Shen, Yikang and Bahri, Dara and Pham, Philip and
               Rao, Jinfeng and Yang, Liu and Ruder, Sebastian and Metzler, Donald},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}""",
    "zhou2004learning": """@inproceedings{zhou2004learning,
  title     = {Learning with Local and Global Consistency},
  author    = {Zhou, Dengyong and Bousquet, Olivier and Lal, Thomas Navin and Weston, Jason and
               Sch{\\"o}lkopf, Bernhard},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2004}
}""",
}


def cite(model: nn.Module) -> str:
    """BibTeX of the papers behind ``model`` and its parts, in the order they appear; also printed.

    A module names its papers in a class attribute ``references``, keys of ``diffusion_mp.cite.REFERENCES``.
    """
    check_kind(model, "model", nn.Module, "a torch.nn.Module")
    keys = dict.fromkeys(key for module in model.modules() for key in getattr(module, "references", ()))
    text = "\n\n".join(REFERENCES[key] for key in keys)
    print(text)
    return text
