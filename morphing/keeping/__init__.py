"""Plans that keep what workers hold, from what ran and the workers that are left or have come.

`instead`: the plan that ran, rerouted around workers that are gone; nothing moves. `reforming`: plans around
the pipelines that are whole (found by `whole`), whose new pipelines are cut where little moves (`recutting`).
"""
