from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    cents = models.IntegerField()


class Event(models.Model):
    """What happened to an order, or with no order to the shop."""

    order = models.ForeignKey(Order, models.CASCADE, null=True)
    what = models.CharField(max_length=100)
    at = models.DateTimeField(auto_now_add=True)
