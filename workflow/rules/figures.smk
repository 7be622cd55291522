"""One rule a figure: editing one figure's module draws that figure again."""

# What a figure is drawn with besides its own module.
DRAWN_WITH = {
    "measurements": ["figures/style"],
    "quality": ["figures/style", "figures/quality_style", "quality/specialisation"],
    "perft": ["figures/style", "figures/quality_style"],
}

for figure in FIGURES.values():

    rule:
        name:
            f"figure_{figure.name}"
        input:
            rows=f"results/{{platform}}/{figure.source}.parquet",
            code=[
                paths.source(f"{name}.py")
                for name in (*DRAWN_WITH[figure.source], f"figures/{figure.module.lstrip('.')}")
            ],
        output:
            svg=report(
                f"reports/{{platform}}/figures/{figure.name}.svg",
                caption="../report/figure.rst",
                category="Figures",
                labels={"figure": figure.title},
            ),
            png=f"reports/{{platform}}/figures/{figure.name}.png",
        log:
            f"results/{{platform}}/logs/figures/{figure.name}.log",
        conda:
            "../../environment.yml"
        params:
            client=paths.source("measure/client.py"),
            figure={"name": figure.name, "title": figure.title, "caption": figure.caption},
        message:
            "draw {output.svg}"
        shell:
            "python -I -S {params.client:q} --running --cli figure --platform {wildcards.platform} --name {params.figure[name]:q}"
            " >{log:q} 2>&1"
